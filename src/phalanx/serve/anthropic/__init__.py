# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API: requests become chats, and the deltas of their answers become Anthropic's blocks and events."""
