# SPDX-License-Identifier: Apache-2.0
"""Formats are checked in a process of their own: one that reaches a limit, or kills it, costs its own request only."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.config.sampling_params import StructuredOutputParams
from phalanx.errors import OptionError
from phalanx.serve.structured_output.compiler import GrammarChecks, compile_structured_output
from tests.support.grammars import accepts, grammars

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture(scope="module")
def checks():
    checks = GrammarChecks(seconds=1)
    yield checks
    checks.forks.close()


def slow_grammar(number=0):
    """A grammar that takes seconds to check."""
    terms = " & ".join(f"/(a|b)*a(a|b){{{i}}}(a|b)*/" for i in range(1, 15))
    return StructuredOutputParams(grammar=f"start: T\nT: {terms}\n// {number}")


def deep_schema():
    """A schema that overflows the library's stack."""
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2_800)} | {"d2800": {}}
    return StructuredOutputParams(json_schema=json.dumps({"$ref": "#/$defs/d0", "$defs": chain}, separators=(",", ":")))


def test_a_format_becomes_a_grammar():
    params = compile_structured_output(StructuredOutputParams(regex="[ab]{5}c"))
    assert accepts(grammars().open(params.compiled), "ababac")
    assert compile_structured_output(params) is params
    with pytest.raises(OptionError, match="unclosed"):
        compile_structured_output(StructuredOutputParams(regex="("))


def test_a_check_that_overflows_the_stack_is_refused(checks):
    with pytest.raises(OptionError, match=r"this json_schema cannot be checked; it takes more than 1 s, .* or the library's stack"):
        checks.compile(deep_schema())
    assert checks.compile(StructuredOutputParams(regex="after")).compiled


def test_short_ones_pass_long_ones_and_callers_share_a_check():
    checks = GrammarChecks(seconds=4)
    checks.compile(StructuredOutputParams(regex="start"))
    with ThreadPoolExecutor(12) as threads:
        slow = [threads.submit(checks.compile, slow_grammar(number)) for number in (0, 1, 0, 0)]
        time.sleep(0.1)
        for number in range(3):
            assert checks.compile(StructuredOutputParams(regex=f"[ab]{{{number + 1}}}")).compiled
        assert not all(one.done() for one in slow)
        for one in slow:
            with pytest.raises(OptionError, match=r"more than 4 s|fuel exhausted"):  # the library's own limit, on an idle core
                one.result()
    assert slow[0].exception() is slow[2].exception() is slow[3].exception()
    checks.forks.close()


def test_memory_has_a_limit():
    checks = GrammarChecks(memory=16 << 20)
    doubling = "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(60))
    with pytest.raises(OptionError, match=r"16 MiB|MemoryError"):
        checks.compile(StructuredOutputParams(grammar=f'start: T0\n{doubling}\nT60: "a"'))
    assert checks.compile(StructuredOutputParams(regex="abc")).compiled
    checks.forks.close()
