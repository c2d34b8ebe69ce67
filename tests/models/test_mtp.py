# SPDX-License-Identifier: Apache-2.0
"""The multi-token prediction module in a checkpoint drafts what transformers' layers make of its tensors, of DeepSeek-V3 and V3.2,
of GLM-4.5 and GLM-5 and of Qwen3-Next; and whatever it drafts, requests get what they get without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from phalanx.comm.group import Group, Solo
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import SlotAssignment, StepBatch, StepRow
from phalanx.errors import OptionError, WeightError
from phalanx.kernels.speculation.drafts import DRAFTS
from phalanx.layout.mtp import Mtp
from phalanx.models import registry, weights
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.mtp import MtpHead
from phalanx.models.slices import LayerContext
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.speculation.model_proposer import ModelProposer
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import BLOCK
from tests.support.models_deepseek import MTP_LAYERS as LAYERS
from tests.support.models_deepseek import module_names, with_module
from tests.support.worker_drafts import K, Staged, pipeline_of, require_alike
from tests.support.worker_graphs import CPU, SLOTS, TOKENS, make_runner, requests, serve

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next", "deepseek_v32", "glm_moe_dsa")
PROMPT = [5, 9, 200, 7, 11, 42, 99, 3, 250, 8, 17]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of each family: the checkpoint, and the one of transformers whose last layer is the module's."""
    parent = tmp_path_factory.mktemp("mtp")
    return {family: with_module(parent, family) for family in FAMILIES}


def reference_drafts(folder: Path, complete: Path, tokens: Sequence[int], count: int) -> list[int]:
    """Qwen's norms multiply by 1 + weight, and each state of its module is normed."""
    before, embedding, hidden, last, joining = module_names(folder.name)
    own = {name.removeprefix(before): value for name, value in load_file(folder / "model.safetensors").items()}
    model, qwen = transformers.AutoModelForCausalLM.from_pretrained(complete, dtype=torch.float32), before == "mtp."
    table, ids, drafts = model.model.embed_tokens.weight, list(tokens[1:]), list[int]()

    def norm(x: Tensor, name: str) -> Tensor:
        weight = own[f"{name}.weight"] + (1.0 if qwen else 0.0)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps) * weight

    with torch.inference_mode():
        states = model(torch.tensor([list(tokens[:-1])]), output_hidden_states=True).hidden_states[LAYERS][0]
        rows = list(model.model.norm(states) if qwen else states)
        for _ in range(count):
            joined = torch.cat([norm(table[torch.tensor(ids)], embedding), norm(torch.stack(rows), hidden)], -1)
            x, size = (joined @ own[f"{joining}.weight"].T).unsqueeze(0), len(ids)
            places = torch.arange(size).unsqueeze(0)
            mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
            out = model.model.layers[LAYERS](
                x, attention_mask=mask, position_ids=places, position_embeddings=model.model.rotary_emb(x, places)
            )  # fmt: skip
            out = (out[0] if isinstance(out, tuple) else out)[0, -1]
            normed = norm(out, last)
            drafts.append(int((model.lm_head.weight @ normed).argmax()))
            ids.append(drafts[-1])
            rows.append(normed if qwen else out)
    return drafts


def mtp_runner(folder: Path, group: Group | None = None) -> ModelRunner:
    proposer, attention = mtp_proposer(folder, group)
    return make_runner(folder, None, group=group, attention=attention, tokens=TOKENS, max_drafts=K, proposer=proposer)


def mtp_proposer(folder: Path, group: Group | None = None, first: int = 0) -> tuple[ModelProposer, Any]:
    """For a stage of the layers from `first` on; and its attention back end."""
    shape, context = ModelShape.from_folder(folder), LayerContext(group or Solo(), torch.float32, CPU, last_embeds=True)
    model = registry.build(shape, range(first, shape.num_layers), context)
    weights.load(model, folder)
    head = MtpHead(Mtp.of(shape), model, context)
    head.load(folder)

    def attention() -> Any:
        return select_backend(CPU, torch.float32, shape.head_dim, shape.latent)

    sizes: dict[str, Any] = {"slots": SLOTS, "max_rows": SLOTS, "max_seq_len": 128, "block_size": BLOCK}
    return ModelProposer(head, attention(), **sizes, dtype=torch.float32, device=CPU), attention


def plain_runner(folder: Path) -> ModelRunner:
    shape = ModelShape.from_folder(folder)
    return make_runner(folder, None, attention=lambda: select_backend(CPU, torch.float32, shape.head_dim, shape.latent))


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("deepseek_v3", 1),
        ("deepseek_v3", 2),
        ("glm4_moe", 1),
        ("glm4_moe_lite", 2),
        ("qwen3_next", 1),
        ("qwen3_next", 2),
        ("deepseek_v32", 1),
        ("deepseek_v32", 2),
        ("glm_moe_dsa", 1),
    ],
)
def test_drafts_are_those_of_the_reference(folders: dict[str, tuple[Path, Path]], family: str, tp: int) -> None:
    folder, complete = folders[family]
    batch = StepBatch(
        admitted=[SlotAssignment(2, PROMPT, len(PROMPT), SamplingParams(temperature=0.0), 1)],
        rows=[StepRow(2, 0, len(PROMPT), PROMPT, list(range(3, 12)), samples=True)], propose=K,
    )  # fmt: skip
    verifying = StepBatch(rows=[StepRow(2, len(PROMPT) + K, 1 + K, [], samples=True, drafts=K, late=K)], propose=K)

    def drafted(group: Group) -> tuple[list[int], list[int], list[int], list[int]]:
        runner = mtp_runner(folder, group)
        ((first,), _) = runner.run(batch).results()
        drafts = runner._state[DRAFTS:, 2].tolist()
        ((second,), _) = runner.run(verifying).results()
        return first.tokens, drafts, second.tokens, runner._state[DRAFTS:, 2].tolist()

    outputs = LocalWorld(tp).run(drafted)
    assert outputs == outputs[:1] * tp
    first, drafts, second, later = outputs[0]
    assert drafts == reference_drafts(folder, complete, PROMPT + first, K)
    assert later == reference_drafts(folder, complete, PROMPT + first + second, K)


@pytest.mark.usefixtures("attention_by_reference")
def test_it_is_on_the_last_stage(folders: dict[str, tuple[Path, Path]]) -> None:
    folder, complete = folders["glm4_moe"]
    layers = ModelShape.from_folder(folder).num_layers
    last = {"max_drafts": K, "proposer": mtp_proposer(folder, first=1)[0]}
    runner = Staged(pipeline_of(folder, [range(1), range(1, layers)], last, returns=True, graphs=False, inner_layers=(layers,)))
    admitted = [SlotAssignment(2, PROMPT, len(PROMPT), SamplingParams(temperature=0.0), 1)]
    row = StepRow(2, 0, len(PROMPT), PROMPT, list(range(3, 12)), samples=True)
    ((result,), _) = runner.run(StepBatch(admitted=admitted, rows=[row], propose=K)).results()
    assert runner._state[DRAFTS:, 2].tolist() == reference_drafts(folder, complete, PROMPT + result.tokens, K)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_changes_no_answer(folders: dict[str, tuple[Path, Path]], family: str) -> None:
    arrivals = requests(1, 10)
    limits = {"prefix_caching": family != "qwen3_next"}  # a hit needs the state of a prefix
    wanted, _ = serve([plain_runner(folders[family][0])], arrivals, **limits)
    updates, scheduler = serve([mtp_runner(folders[family][0])], arrivals, max_drafts=K, drafts_keep_kv=True, **limits)
    require_alike(updates, wanted)
    assert scheduler.stats().draft_tokens > 100


def test_a_checkpoint_without_it_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "deepseek", "deepseek_v3")
    shape, context = ModelShape.from_folder(folder), LayerContext(Solo(), torch.float32, CPU)
    model = registry.build(shape, range(shape.num_layers), context)
    with pytest.raises(WeightError, match=r"holds no model\.layers\.2"):
        MtpHead(Mtp.of(shape), model, context).load(folder)
    qwen = write_checkpoint(tmp_path / "qwen", "qwen3_next")
    shape = ModelShape.from_folder(qwen)
    with pytest.raises(WeightError, match=r"holds no mtp\.\*"):
        MtpHead(Mtp.of(shape), registry.build(shape, range(shape.num_layers), context), context).load(qwen)
    with pytest.raises(OptionError, match="LlamaForCausalLM with 0 modules"):
        Mtp.of(ModelShape.from_folder(write_checkpoint(tmp_path / "llama", "llama")))
