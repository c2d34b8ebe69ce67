# SPDX-License-Identifier: Apache-2.0
"""A server with a scripted engine, shared by the tests of one file."""

from __future__ import annotations

import pytest

from tests.support.serve_http_app import Live, Scripted, live

TEXT = "Hello wörld 🙂🙃, this is a rank. 你好!"


@pytest.fixture(scope="module")
def server() -> Live:
    with live(Scripted(TEXT)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def http(server):
    with server.client() as client:
        yield client
