# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses`: its routes, the store of responses, and how a response becomes a chat and a chat's answer a response."""
