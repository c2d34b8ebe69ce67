# SPDX-License-Identifier: Apache-2.0
"""What is told of requests that have ended: lines of the log, and traces."""
