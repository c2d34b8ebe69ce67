# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from phalanx.config import dotted_path
from phalanx.errors import OptionError


def test_a_path_leads_to_its_object() -> None:
    assert dotted_path.load("json:JSONDecoder", option="launcher") is json.JSONDecoder


@pytest.mark.parametrize(
    ("path", "failure"),
    [
        ("json", "launcher='json' is no dotted path"),
        ("json:", "launcher='json:' is no dotted path"),
        ("no_such_module:Name", "launcher='no_such_module:Name' cannot be loaded; No module named"),
        ("json:Nothing", "launcher='json:Nothing' cannot be loaded; module 'json' has no attribute 'Nothing'"),
    ],
)
def test_a_path_that_leads_nowhere_names_the_option(path: str, failure: str) -> None:
    with pytest.raises(OptionError, match=failure):
        dotted_path.load(path, option="launcher")
