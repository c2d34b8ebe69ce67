# SPDX-License-Identifier: Apache-2.0
"""Whether the limit of open files admits every stream."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Level, error, ok
from phalanx.health.subject import Subject

RESERVE = 512
"""Libraries, model files, the ranks' pipes and sockets, and the log."""


def examine(subject: Subject) -> Finding:
    soft, hard = subject.host.limit("nofile")
    need = subject.streams + RESERVE
    limit = hard if hard is None or soft is None else max(soft, hard)
    facts = {"soft": soft, "hard": hard, "need": need}
    if limit is not None and limit < need:
        return error(
            f"{limit} open files are allowed, and {subject.streams} streams need {need}",
            "raise the hard limit, or lower the queue",
            f"ulimit -Hn {max(65536, need)}",
            f"docker run --ulimit nofile={max(65536, need)} ...",
            f"phalanx serve ... --max_num_queued_reqs {max(limit - RESERVE - (subject.streams // 9 or 1), 0)}",
            **facts,
        )
    if soft is not None and soft < need:
        return Finding(Level.NOTE, f"the soft limit is {soft} open files; the server raises it at its start", facts=dict(facts))
    return ok(f"{soft or 'unlimited'} open files are allowed, and {need} may be needed", **facts)


CHECK = Check(
    name="open_files",
    what="the limit of open files against the streams that the server admits",
    why="each open request takes a descriptor: past the limit connections are refused with 'Too many open files'",
    cure="raise the limit of open files (nofile)",
    threads=("https://github.com/vllm-project/vllm/issues/7920", "https://github.com/vllm-project/vllm/pull/11530"),
    examine=examine,
    symptoms=(r"Too many open files", r"EMFILE"),
)
