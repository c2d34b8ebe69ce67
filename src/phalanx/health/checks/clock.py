# SPDX-License-Identifier: Apache-2.0
"""Whether the clocks of this host, of servers and of peers agree."""

from __future__ import annotations

import datetime

from phalanx.health.check import Check, Finding, ok, skipped, warning
from phalanx.health.subject import Subject

LIMIT_SECONDS = 5.0
"""The HTTP Date header counts whole seconds, and a report of a peer is some seconds old: only more is a fault."""
REPORT_AGE_SECONDS = 600.0


def examine(subject: Subject) -> Finding:
    skews = {server.url: server.skew for server in subject.servers if server.skew is not None}
    now = datetime.datetime.now(datetime.UTC)
    for peer in subject.peers:
        ahead = (datetime.datetime.fromisoformat(peer["host"]["time"]) - now).total_seconds()
        if ahead > 0 or ahead < -REPORT_AGE_SECONDS * 144:  # an older report says nothing of the clock, unless it is of the future
            skews[peer["host"]["name"]] = max(ahead, 0.0)
    wrong = {name: skew for name, skew in skews.items() if abs(skew) > LIMIT_SECONDS}
    if wrong:
        named = ", ".join(f"{name} is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}" for name, skew in wrong.items())
        return warning(f"clocks differ: {named}", "synchronize the clocks by NTP", "timedatectl set-ntp true", skews=wrong)
    return (
        ok(f"{len(skews)} clocks agree with this one") if skews else skipped("no other clock to compare with: no URL and no peer")
    )


CHECK = Check(
    name="clock",
    what="the clocks of servers and of other hosts",
    why="certificates and tokens seem expired, and logs of several hosts cannot be put in order",
    cure="run an NTP client on each host",
    threads=("https://github.com/huggingface/huggingface_hub/issues/4128", "https://chrony-project.org/documentation.html"),
    examine=examine,
    symptoms=(r"certificate", r"not yet valid", r"RequestTimeTooSkewed"),
)
