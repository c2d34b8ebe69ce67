# SPDX-License-Identifier: Apache-2.0
"""What the sampler is made of: what each request asked for, what it has had, and what goes back to the host."""
