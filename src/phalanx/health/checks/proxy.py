# SPDX-License-Identifier: Apache-2.0
"""Whether an HTTP proxy stands between clients of this host and its server."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, note, ok
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
    environment = subject.host.environment
    proxy = environment.get("http_proxy") or environment.get("HTTP_PROXY")
    if not proxy:
        return ok("no HTTP proxy is set")
    excluded = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").replace(" ", "").split(",")
    local = {"localhost", "127.0.0.1"}
    if "*" in excluded or local <= set(excluded):
        return ok(f"the proxy {proxy} is not used for this host")
    missing = sorted(local - set(excluded))
    return note(
        f"http_proxy={proxy} also stands for {' and '.join(missing)}: curl and OpenAI clients of this host ask the proxy for the"
        " server",
        "exclude this host",
        f"export no_proxy={','.join([*filter(None, excluded), *missing])}",
    )


CHECK = Check(
    name="proxy",
    what="http_proxy and no_proxy",
    why="requests to localhost go to the proxy, which answers 502 or 403",
    cure="exclude localhost from the proxy",
    threads=("https://github.com/vllm-project/vllm/issues/7074", "https://curl.se/docs/manpage.html"),
    examine=examine,
    symptoms=(r"\b502\b", r"\bproxy\b"),
)
