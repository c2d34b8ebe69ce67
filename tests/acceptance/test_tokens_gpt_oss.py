# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of gpt-oss equal transformers': real rank processes, chunked prompts, a prefix cache that is hit, and preemptions,
with experts in 16 bit and in MXFP4, over tensor, expert and pipeline ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import LLM, SamplingParams
from phalanx.config.model import ModelShape
from phalanx.layout import Layout
from phalanx.layout.cache import group_windows
from phalanx.layout.families import model_cache
from phalanx.layout.memory import block_bytes, blocks_of_request, stage_caches
from tests.support import mxfp4_checkpoints
from tests.support.checkpoints import write_checkpoint
from tests.support.greedy_tokens import (
    BLOCK,
    NEW_TOKENS,
    assert_layout_gives,
    longest_request,
    prompts_of_all_lengths,
    reference_tokens,
)

pytestmark = pytest.mark.usefixtures("forked_python")

LAYOUTS = {"mxfp4": [(1, 1, 1), (4, 2, 1)], "16 bit": [(2, 2, 2)]}
"""(tp, moe_ep, pp); the model's own tests have more, in one process."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[list[int]]]]:
    """Form -> (folder, greedy tokens of each prompt)."""
    root = tmp_path_factory.mktemp("gpt_oss")
    plain = write_checkpoint(root / "plain", "gpt_oss", num_hidden_layers=3)
    stored, meant = mxfp4_checkpoints.rewrite(plain, root)
    expected = {}
    for form, folder, reference_folder in (("16 bit", plain, plain), ("mxfp4", stored, meant)):
        tokens = reference_tokens(reference_folder, prompts_of_all_lengths(), NEW_TOKENS, experts_implementation="eager")
        expected[form] = folder, tokens
    return expected


@pytest.mark.parametrize(("form", "layout"), [(form, layout) for form, layouts in LAYOUTS.items() for layout in layouts])
def test_tokens_equal_transformers(references, form, layout):
    folder, expected = references[form]
    tp, _, pp = layout
    cache_bytes = _cache_bytes(folder, tp, pp, longest_request(prompts_of_all_lengths()))
    assert_layout_gives(expected, folder, layout, cache_bytes=cache_bytes)


@pytest.mark.gpu1
@pytest.mark.parametrize("form", list(LAYOUTS))
def test_tokens_on_a_gpu_equal_those_on_a_cpu(references, form):
    """In fp32, by the kernels that a GPU runs: captured decode and mixed steps, sinks, windows, experts.

    The test above compares those on a CPU with transformers 5.23; its version 5.17 gives others on a CPU, too."""
    folder, _ = references[form]
    longest = longest_request(prompts_of_all_lengths())
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    tokens = {}
    for device in ("cpu", "cuda"):
        with LLM(folder, device=device, dtype="fp32", max_seq_len=longest, max_num_tokens=64, max_batch_size=8) as llm:
            outputs = llm.generate(prompts_of_all_lengths(), params, use_tqdm=False)
        tokens[device] = [output.outputs[0].token_ids for output in outputs]
    assert tokens["cuda"] == tokens["cpu"]


def _cache_bytes(folder: Path, tp: int, pp: int, longest: int) -> int:
    """Room for little more than one request at its largest, on the rank with the most layers. Of those with a window that is the
    window: the blocks behind it are of use to others."""
    shape = ModelShape.from_folder(folder)
    windows = group_windows(model_cache(shape))
    assert windows.count(None) == 1, "layers without a window are apart from those with one"
    assert len(windows) > 1
    block = max(block_bytes(caches, BLOCK) for caches in stage_caches(shape, "fp32", "fp32", Layout(tp=tp, pp=pp)))
    return block * (blocks_of_request(windows, longest, BLOCK) + 3 * len(windows))
