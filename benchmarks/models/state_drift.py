# SPDX-License-Identifier: Apache-2.0
"""Whether states of recurrent models drift: a small model with random weights draws N tokens, one in each step, as a request that
decodes for long. At some lengths its states stand beside those of the same tokens computed anew as a prompt, in chunks.

Apart: the largest over layers and kinds of states of |state - anew| / |anew| (Frobenius). Logits: the largest difference at any of
the positions since the length before, and how often the most likely token is the same. All is in fp32, so that what is apart is the
order of sums: on a CPU that of the GEMMs of a step, on a GPU also that of the kernels of decode rows and of prompts.

    python -m benchmarks.models.state_drift --out DIR [--tokens 32768] [--families qwen3_next,qwen3_5] [--device cuda]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import harness
from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.models import registry, weights
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache, empty_caches
from phalanx.models.decoder import Decoder
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.slices import LayerContext

FAMILIES = ("qwen3_next", "qwen3_5", "granite_hybrid", "nemotron_h")
BLOCK, CHUNK, FIRST = 64, 512, 256
LAYERS = 4

States = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Drift:
    """At a length in tokens; see the module."""

    length: int
    apart: float
    logits: float
    same: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors are small
    for family in arguments.families.split(","):
        begin = time.perf_counter()
        drifts = of_family(family, arguments.tokens, arguments.device)
        figures = {"seconds": round(time.perf_counter() - begin), "drift": [asdict(drift) for drift in drifts]}
        for drift in drifts:
            print(f"{family:16} {drift.length:6} {drift.apart:10.2e} {drift.logits:10.2e} {drift.same:8.5f}", flush=True)
        facts = {"tokens": arguments.tokens, "device": arguments.device, family: figures}
        harness.write(f"models_state_drift_{family}", facts, arguments.out)
    return 0


@torch.inference_mode()
def of_family(family: str, tokens: int, device: str = "cpu") -> list[Drift]:
    from tests.support.checkpoints import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / family, family, max_position_embeddings=tokens + 1, **_layers(family))
        shape = ModelShape.from_folder(checkpoint)
        model = registry.build(shape, range(shape.num_layers), LayerContext(Solo(), torch.float32, torch.device(device)))
        weights.load(model, checkpoint)
    lengths = [FIRST << power for power in range(tokens.bit_length()) if FIRST << power < tokens] + [tokens]
    ids, logits, states = _generated(model, lengths)
    again, anew = _computed(model, _chunks(ids, lengths), lengths)
    drifts = []
    for number, (begin, end) in enumerate(pairwise([0, *lengths])):
        own, other = logits[begin:end], again[begin:end]
        same = (own.argmax(-1) == other.argmax(-1)).double().mean()
        drifts.append(Drift(end, _apart(states[number], anew[number]), float((own - other).abs().max()), float(same)))
    return drifts


def _layers(family: str) -> dict[str, int]:
    return {} if family == "nemotron_h" else {"num_hidden_layers": LAYERS}  # whose layers are a list


def _generated(model: Decoder, lengths: list[int]) -> tuple[list[int], Tensor, list[States]]:
    """Tokens that are drawn one by one, from their logits at temperature 1, each the input of the next step."""
    generator, ids = torch.Generator().manual_seed(1), [5]

    def drawn() -> Iterator[list[int]]:
        while len(ids) <= lengths[-1]:
            yield ids[-1:]

    def draw(logits: Tensor) -> None:
        ids.append(int(torch.multinomial(logits[-1].softmax(-1), 1, generator=generator)))

    logits, states = _computed(model, drawn(), lengths, draw)
    return ids[:-1], logits, states


def _chunks(ids: list[int], lengths: list[int]) -> Iterator[list[int]]:
    for begin, end in pairwise([0, *lengths]):
        for first in range(begin, end, CHUNK):
            yield ids[first : min(first + CHUNK, end)]


def _computed(
    model: Decoder, steps: Iterator[list[int]], lengths: list[int], then: Callable[[Tensor], None] = lambda _: None
) -> tuple[Tensor, list[States]]:
    """Each step's tokens in one forward of one row. then: gets its logits. Returns all logits, and the states at `lengths`."""
    shape, blocks, device = model.shape, -(-lengths[-1] // BLOCK), model.context.device
    caches = empty_caches(model.declared_caches(), blocks, BLOCK, device)
    backend = select_backend(device, torch.float32, shape.head_dim)
    on_host = torch.arange(blocks, dtype=torch.int32).unsqueeze(0)
    table, slot = on_host.to(device), torch.zeros(1, dtype=torch.int64, device=device)
    logits, states, done = [], list[States](), 0
    for ids in steps:
        end = done + len(ids)
        positions = torch.arange(done, end, device=device)
        batch = Batch(
            torch.tensor(ids, device=device), positions, positions, torch.tensor([0, len(ids)], dtype=torch.int32, device=device),
            torch.tensor([end], dtype=torch.int32, device=device), table, torch.arange(len(ids), device=device), [0, len(ids)],
            [end], block_tables_cpu=on_host.numpy(), table_rows=slot,
        )  # fmt: skip
        batch.attention, done = backend.plan(batch), end
        logits.append(model(batch, caches).float().cpu())
        then(logits[-1])
        if done in lengths:
            states.append(_states(caches))
    return torch.cat(logits), states


def _states(caches: list[LayerCache]) -> States:
    return [{name: cache[name][0].clone() for name in cache.states} for cache in caches]


def _apart(states: States, anew: States) -> float:
    return max(
        float((own[name] - other[name]).norm() / other[name].norm())
        for own, other in zip(states, anew, strict=True)
        for name in own
    )


if __name__ == "__main__":
    sys.exit(main())
