# SPDX-License-Identifier: Apache-2.0
"""The default options hold unless the user overrides them, and what cannot run is refused before anything starts."""

from __future__ import annotations

import pytest

from phalanx.bench import offline, workloads
from phalanx.errors import EngineError, OptionError
from tests.bench.conftest import requested_options


def test_the_default_options(tiny_shape):
    with offline.target(requested_options(tiny_shape)) as target:
        options = target.options
        assert (options.max_batch_size, options.max_num_tokens, options.enable_prefix_caching) == (512, 8192, False)
        assert options.max_seq_len == 512  # of the model, which is less than 4096
        assert options.skip_tokenizer_init
    with offline.target(requested_options(tiny_shape, max_batch_size=8, enable_prefix_caching=True)) as target:
        assert (target.options.max_batch_size, target.options.enable_prefix_caching) == (8, True)
        assert offline.requested_options(target)["max_batch_size"] == 8


def test_a_shape_by_name_needs_no_download():
    raw_options = requested_options("llama-3-70b")
    raw_options.values.pop("load_format")
    with offline.target(raw_options) as target:
        assert target.options.load_format == "dummy"
        assert (target.shape.num_layers, target.options.max_seq_len) == (80, 4096)
        assert offline.requested_options(target)["model"] == "llama-3-70b"


def test_bad_values_name_their_source(tiny_shape):
    with (
        pytest.raises(OptionError, match=r"max_batch_size='many' is not valid; it comes from the test"),
        offline.target(requested_options(tiny_shape, max_batch_size="many")),
    ):
        pass


def test_requests_that_are_too_long(target):
    with pytest.raises(OptionError, match=r"requests of 601 tokens do not fit max_seq_len=512"):
        offline.check(target, [workloads.parse("decode-1x100x500")])


def test_decodes_that_could_not_run_together(tiny_shape):
    """Their time per token would be that of several rounds."""
    with offline.target(requested_options(tiny_shape, max_batch_size=8)) as target:
        offline.check(target, [workloads.parse("decode-8x8x8"), workloads.parse("batch-9x8x8")])
        with pytest.raises(OptionError, match=r"decode-9x8x8 does not fit max_batch_size=8"):
            offline.check(target, [workloads.parse("decode-9x8x8")])


def test_another_number_of_tokens_is_an_error(running, monkeypatch):
    _, llm = running
    monkeypatch.setattr(offline, "params", lambda count: workloads.params(count - 1))
    with pytest.raises(EngineError, match="the engine gave 4 new tokens instead of 5"):
        offline.seconds_of(llm, [[5, 6, 7]], 5)
