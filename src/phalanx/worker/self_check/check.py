# SPDX-License-Identifier: Apache-2.0
"""`self_check`: the steps of a start's check run as requests will, and by the reference path on the same weights: eagerly, linear
layers and attention in plain torch, all-reduces by NCCL or gloo. Beyond a bound the start fails, and the error names what moved the
answers: from the reference path on, one part after the other is switched on again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from phalanx.comm.group import Group
from phalanx.comm.shared_memory import share_text
from phalanx.comm.tuned_group import TunedGroup
from phalanx.config.options import EngineOptions
from phalanx.errors import EngineError, SelfCheckFailed
from phalanx.layout import Layout
from phalanx.models.decoder import Decoder
from phalanx.models.layers.linear_methods.plain import compared_linears
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.self_check.compare import Agreement, LogitsRecorder, Run, agreement
from phalanx.worker.self_check.history import recorded
from phalanx.worker.self_check.parts import Part, names, parts_of
from phalanx.worker.self_check.steps import CheckStep, check_steps

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.float16: 0.002}
"""Nats of KL divergence, of the worst kind of step, by the dtype of arithmetic. docs/operations.md says where they come from."""
CHOICES_BOUND = 0.1
"""Where a last bit may change a choice: the experts of a token, or the quantum of an activation or of a cached key."""
SUSPECT = 0.01
"""Relative error of a layer's output from which it is named. Those of right kernels in bf16 are below it."""


class SelfCheck:
    """One rank's part in it; all calls are collective over `world`, all ranks.

    tp: the group whose all-reduces follow a table. steps: of `check_steps`. compares: this rank has the logits, and compares them.
    slots: of the runner.
    """

    def __init__(
        self, runner: ModelRunner, model: Decoder, world: Group, tp: Group, steps: Sequence[CheckStep], *, compares: bool,
        slots: int,
    ) -> None:  # fmt: skip
        self._runner, self._model, self._world, self._steps, self._compares = runner, model, world, steps, compares
        self._device = model.context.device
        self._recorder = LogitsRecorder(slots, model.shape.vocab_size, self._device, keeps=compares)
        self._parts = parts_of(runner, model, tp)
        self.bound = bound_of(model)

    def run(self) -> Agreement | None:
        """What this rank has compared; None where it compares nothing. Raises SelfCheckFailed on the ranks that compare."""
        reference = self._run(self._parts)
        own = self._agreement(self._run(()), reference)
        if self._everywhere_within(own):
            return own
        culprits = self._culprits(reference)
        layers = self._linear_differences() if any(part.name == "linear kernels" for part in culprits) else ""
        if own is None:
            return None
        raise self._failure(own, culprits, layers)

    def _run(self, off: Collection[Part]) -> Run:
        """The steps, with these parts off."""
        with ExitStack() as stack:
            for part in off:
                stack.enter_context(part.off())
            stack.enter_context(self._runner.changed(sampler=self._recorder))
            run = []
            try:
                for step in self._steps:
                    self._runner.run(step.batch).results()
                    run.append((step.kind, self._recorder.take()))
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    "the self check needs more memory than is left", why=f"it multiplies by dequantized weights: {error}",
                    next="lower kv_cache_free_gpu_memory_fraction, or use self_check=False",
                ) from error  # fmt: skip
            return run

    def _agreement(self, run: Run, reference: Run) -> Agreement | None:
        return agreement(run, reference) if self._compares else None

    def _everywhere_within(self, own: Agreement | None) -> bool:
        """Whether every rank that compares is within the bound: the same answer on all ranks."""
        fact = torch.full((1, 1), int(own is None or own.within(self.bound)), device=self._device)
        return bool(self._world.all_gather(fact, dim=0).all())

    def _culprits(self, reference: Run) -> list[Part]:
        """The parts that move the answers: from the reference path on, each is switched on, and off again if it does."""
        off, culprits = list(self._parts), list[Part]()
        for part in self._parts:
            if part.contains_others and culprits:
                continue
            rest = [each for each in off if each is not part]
            if self._everywhere_within(self._agreement(self._run(rest), reference)):
                off = rest
            else:
                culprits.append(part)
        return culprits

    def _linear_differences(self) -> str:
        """The first layer of each rank whose kernels differ from its plain multiplication, about as much as any, where one does."""
        with compared_linears(self._model) as differences:
            self._run([part for part in self._parts if part.name != "linear kernels"])
            every = differences()
        least = max(SUSPECT, max((each.error for each in every), default=0.0) / 2)
        text = next((str(each) for each in every if each.error >= least), "")
        texts = share_text(self._world, text, self._device)
        return "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(texts) if each)

    def _failure(self, own: Agreement, culprits: Sequence[Part], layers: str) -> SelfCheckFailed:
        figures = f"{own.worst}: KL {own.worst_kl:.2g}, at most {self.bound:.2g}; top-1 {own.top1:.1%} of {own.positions} positions"
        if not own.finite:
            figures = "logits are NaN or infinite"
        if not culprits:
            why = "the same steps gave other logits when they ran again: a race, or hardware that is at fault"
            advice = "run `phalanx doctor`, and report this with the log"
        else:
            why = f"moved by {names(culprits)}" + (f" ({layers})" if layers else "")
            advice = "; ".join(dict.fromkeys(part.advice for part in culprits))
        return SelfCheckFailed(
            "this machine does not give the answers of the reference path", held=figures, why=why,
            next=f"{advice}; self_check=False starts without the check",
        )  # fmt: skip


def bound_of(model: Decoder) -> float:
    """Of KL, for what this model computes in."""
    context, experts = model.context, model.shape.experts
    activations = context.quantization is not None and context.quantization.activations != "none"
    choices = experts is not None or activations or context.kv_cache_dtype != "model"
    return CHOICES_BOUND if choices else BOUNDS[context.dtype]


def check_answers(
    runner: ModelRunner, model: Decoder, world: Group, tp: Group, options: EngineOptions, *, blocks: int, max_num_tokens: int,
    max_seq_len: int, compares: bool,
) -> str:  # fmt: skip
    """The whole check on one rank; returns the line for the log on a rank that compares, else "". Raises SelfCheckFailed. blocks:
    of the KV cache. Collective over `world`, all ranks; afterwards every slot is free."""
    steps = check_steps(
        vocab_size=model.shape.vocab_size, max_num_tokens=max_num_tokens, max_seq_len=max_seq_len, max_rows=runner.max_rows,
        block_size=options.block_size, blocks=blocks, groups=model.cache_groups,
    )  # fmt: skip
    if len(steps) == 1:
        raise EngineError(
            "the self check has no room for a prompt", held=f"max_seq_len={max_seq_len}, {blocks} KV blocks",
            next="raise max_seq_len and the memory of the KV cache, or use self_check=False",
        )  # fmt: skip
    check = SelfCheck(runner, model, world, tp, steps, compares=compares, slots=options.index_batch_size)
    answers = check.run()
    if answers is None:
        return ""
    device = model.context.device
    facts = {
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "model": Path(options.model).name,
        "tensors": str(model.shape), "dtype": f"{options.dtype}, {options.kv_cache_dtype}", "layout": str(Layout.of(options)),
        "link": str(tp.rules.fingerprint) if isinstance(tp, TunedGroup) else "",
    }  # fmt: skip
    return recorded(answers, check.bound, facts)
