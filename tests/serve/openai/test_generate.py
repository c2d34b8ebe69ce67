# SPDX-License-Identifier: Apache-2.0
"""The usage of a response."""

from __future__ import annotations

from phalanx.serve.openai.generate import UsageCounter
from phalanx.serve.openai.schema.responses import UsageInfo
from phalanx.serve.outputs import CompletionDelta


def test_tokens_that_were_drafts_are_counted_where_there_are_any() -> None:
    usage = UsageCounter([[1, 2, 3]], 2)
    usage.add(CompletionDelta(0, "a", [4]))
    assert "completion_tokens_details" not in usage.body()
    usage.add(CompletionDelta(0, "bcd", [5, 6, 7], accepted=2, rejected=4))
    usage.add(CompletionDelta(1, "e", [8, 9], accepted=1))
    body = usage.body()
    UsageInfo.model_validate(body)
    assert body["completion_tokens"] == 6
    assert body["completion_tokens_details"] == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4}
    none = UsageCounter([[1]], 1, predicted=True).body()
    assert none["completion_tokens_details"] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
