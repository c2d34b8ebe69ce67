# SPDX-License-Identifier: Apache-2.0
"""Every alert rule fires in its case and in no other: by promtool where it is installed, and by an evaluation of our own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.promql import Series, firing

DASHBOARDS = Path(__file__).resolve().parents[1] / "dashboards"
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}
CASES = yaml.safe_load((DASHBOARDS / "alerts_test.yaml").read_text(encoding="utf-8"))["tests"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="not run: promtool is not installed")
@pytest.mark.parametrize("words", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")], ids=" ".join)
def test_promtool(words):
    done = subprocess.run(["promtool", *words], cwd=DASHBOARDS, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_alerts_fire_when_they_must(case):
    series = Series(case["input_series"])
    for check in case["alert_rule_test"]:
        expected = [(alert["exp_labels"], alert["exp_annotations"]) for alert in check.get("exp_alerts", ())]
        minute = int(check["eval_time"].removesuffix("m"))
        assert firing(RULES[check["alertname"]], series, minute) == expected, (check["alertname"], minute)


def test_every_alert_fires_in_a_case_and_is_silent_in_another():
    checks = [check for case in CASES for check in case["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check.get("exp_alerts")} == set(RULES)
    assert {check["alertname"] for check in CASES[0]["alert_rule_test"]} == set(RULES)
    assert not any(check.get("exp_alerts") for check in CASES[0]["alert_rule_test"])


def test_what_the_evaluation_does_not_know_is_an_error():
    with pytest.raises(ValueError, match="not understood"):
        firing({"expr": "a + b > 1", "for": "0m"}, Series([]), 0)
