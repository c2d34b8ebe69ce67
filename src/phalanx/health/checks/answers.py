# SPDX-License-Identifier: Apache-2.0
"""The answers of this machine, where the user wants an engine started for them."""

from __future__ import annotations

from phalanx.errors import PhalanxError, SelfCheckFailed
from phalanx.health.check import Finding, Need, check, error, note, skipped
from phalanx.health.subject import Subject


@check(
    why="a kernel, an all-reduce or an upgrade changes what a model answers, and no request fails",
    cure="follow the part that the self check names",
    threads=("vllm-project/vllm/pull/2760", "ROCm/aiter/issues/4855", "vllm-project/vllm/issues/50435"),
    needs=(Need.MODEL, Need.QUALITY),
    slow=True,
)
def same_answers(subject: Subject) -> Finding:
    """the self check of an engine that is started for it (--quality)"""
    from phalanx.bench.offline import self_check_lines

    options = subject.options
    assert options is not None
    if options.load_format == "dummy":
        return skipped("dummy weights hide faults")
    try:
        lines = self_check_lines(options)
    except PhalanxError as failure:
        reason = "; ".join(part for part in (failure.failure, failure.held, failure.why) if part)
        unchecked = "" if isinstance(failure, SelfCheckFailed) else "no answer was checked, since the engine did not start: "
        return error(unchecked + reason, failure.next or "see the log of the start")
    return note("; ".join(lines))
