# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API: requests and their validation, handlers, streamed responses and errors. `serve.app` assembles the routes."""
