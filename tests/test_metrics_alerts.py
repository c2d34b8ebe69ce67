# SPDX-License-Identifier: Apache-2.0
"""Every alert rule fires in its case and in no other, by promtool, which `.ci/run` fetches."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DASHBOARDS = Path(__file__).resolve().parents[1] / "dashboards"
GROUPS = yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
RULES = {rule["alert"] for group in GROUPS for rule in group["rules"]}
CASES = yaml.safe_load((DASHBOARDS / "alerts_test.yaml").read_text(encoding="utf-8"))["tests"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="not run: promtool is not installed")
@pytest.mark.parametrize("words", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")], ids=" ".join)
def test_promtool(words):
    done = subprocess.run(["promtool", *words], cwd=DASHBOARDS, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_a_case_and_is_silent_in_another():
    checks = [check for case in CASES for check in case["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check.get("exp_alerts")} == RULES
    assert {check["alertname"] for check in CASES[0]["alert_rule_test"]} == RULES
    assert not any(check.get("exp_alerts") for check in CASES[0]["alert_rule_test"])
