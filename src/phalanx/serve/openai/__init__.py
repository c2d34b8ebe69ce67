# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API: what a client may ask, how it is refused, and how answers are made and streamed. No door of its own: `serve.app`
puts the routes together."""
