# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest

from phalanx.bench.prediction import cli
from phalanx.bench.prediction.ranges import RANGES, require
from phalanx.errors import OptionError


@pytest.mark.parametrize("name", sorted(RANGES))
def test_no_range_has_infinity_or_what_is_no_number(name: str) -> None:
    for value in (math.inf, math.nan):
        with pytest.raises(OptionError, match=f"{name}={value} is out of range; give "):
            require({name: value})


@pytest.mark.parametrize("command", [cli.layouts, cli.simulate, cli.calibrate])
def test_each_number_of_a_command_has_a_range(command: Callable[..., None]) -> None:
    numbers = {name for name, kind in get_type_hints(command).items() if {int, float} & {kind, *get_args(kind)}}
    assert numbers
    assert numbers <= RANGES.keys()


@pytest.mark.parametrize("value", [0, 1.5, math.nan])
def test_a_number_without_a_range_is_no_number_in_range(value: Any) -> None:
    with pytest.raises(KeyError, match="isll"):
        require({"isl": 1, "isll": value})
    require({"isll": None, "model": "demo", "verify": True})
