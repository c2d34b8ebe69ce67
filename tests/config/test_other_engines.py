# SPDX-License-Identifier: Apache-2.0
"""Flags of other engines lead to ours, or to the reason why there is none; the page about them shows what is printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from phalanx import cli
from phalanx.config import EngineOptions, SamplingParams
from phalanx.config.other_engines import ENGINES, SAME, hint
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import ALIASES, read_sources
from phalanx.errors import UnknownOption

OPTIONS = {*EngineOptions.model_fields, *ServeOptions.model_fields, *ALIASES, "config"}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming_from.md"


@pytest.mark.parametrize("engine", ENGINES)
def test_counterparts_are_options_and_their_names_are_none(engine):
    for flag, (ours, note) in ENGINES[engine].items():
        name = flag.replace("-", "_")
        assert name == "model" or name not in OPTIONS, f"{engine}'s --{flag} is an option here: an error would never name it"
        assert ours.removeprefix("no_") in OPTIONS if ours else note, f"{engine}'s --{flag} leads nowhere"
    assert set(SAME[engine]) <= OPTIONS
    assert not {name.replace("_", "-") for name in SAME[engine]} & {flag.replace("_", "-") for flag in ENGINES[engine]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve m --gpu_memory_utilization=0.9", "--kv_cache_free_gpu_memory_fraction here (of the memory that weights"),
        ("serve m --disable-radix-cache", "SGLang's --disable-radix-cache is --no_enable_prefix_caching here"),
        ("serve m --max-queued-requests 3", "SGLang's --max-queued-requests is --max_num_queued_reqs here"),
        ("serve m --free_gpu_memory_fraction 0.9", "TensorRT-LLM's --free_gpu_memory_fraction is --kv_cache_free_gpu_memory"),
        ("generate m --max-new-tokens 3", "SGLang's max_new_tokens is --max_tokens here"),
        ("serve m --lora-paths x", "SGLang's --lora-paths is --lora_modules here (NAME=FOLDER)"),
        ("serve m --enable-lora", "--max_loras here (above 0)"),
        ("serve m --speculative-algorithm NGRAM", 'use the field "method" of speculative_config'),
        ("serve m -tp 2", "SGLang's --tp is --tensor_parallel_size here"),
        ("serve m -dp=2", "SGLang's --dp is --replicas here"),
        ("serve m --tensor_paralel_size 2", "flag --tensor_paralel_size is unknown; did you mean --tensor_parallel_size?"),
        ("serve m --xyzzy", "flag --xyzzy is unknown; `phalanx serve --help` lists those that are"),
    ],
)
def test_the_command_line_names_our_flag(line, message, capsys):
    assert cli.main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_keywords_files_and_variables_name_it_in_their_own_spelling(tmp_path):
    with pytest.raises(UnknownOption, match=r"vLLM's max_num_seqs is 'max_batch_size' here"):
        EngineOptions.of(model="m", max_num_seqs=4)
    with pytest.raises(UnknownOption, match=r"vLLM's enforce_eager is 'cuda_graphs' set to false here"):
        EngineOptions.of(model="m", enforce_eager=True)
    with pytest.raises(UnknownOption, match=r"transformers's num_return_sequences is 'n' here"):
        SamplingParams(num_return_sequences=2)
    with pytest.raises(UnknownOption, match=r"vLLM's max_model_len is PHALANX_MAX_SEQ_LEN here"):
        read_sources({}, environ={"PHALANX_MAX_MODEL_LEN": "4"})
    file = tmp_path / "options.yaml"
    file.write_text("max-num-seqs: 4", encoding="utf-8")
    with pytest.raises(UnknownOption, match=r"vLLM's max_num_seqs is 'max_batch_size' here"):
        read_sources({}, file=file, environ={})


def test_an_option_that_the_caller_does_not_have_is_not_named():
    assert hint("max_queued_requests", EngineOptions.model_fields, repr) == ""
    assert hint("url", ["", "host"], "--{}".format) == "", "doctor's argument has no name"


def test_the_page_shows_what_is_printed(capsys):
    shown = re.findall(r"^\$ phalanx (.*)\n(phalanx: .*)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(shown) == 2
    for line, printed in shown:
        assert cli.main(shlex.split(line)) == 2
        assert capsys.readouterr().err.strip() == printed
