# SPDX-License-Identifier: Apache-2.0
"""Which method the experts of a layer have: by the quantization of checkpoint or load, and by the form of the tensors."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.config import dotted_path
from phalanx.config.experts import Experts
from phalanx.config.quantization import require_uniform
from phalanx.errors import ModelError
from phalanx.models.layers.expert_methods.grouped import GroupedExperts
from phalanx.models.layers.expert_methods.method import ExpertMethod
from phalanx.models.layers.expert_methods.stacked import StackedExperts
from phalanx.models.slices import LayerContext


def expert_method(prefix: str, local: Sequence[int], experts: Experts, context: LayerContext) -> ExpertMethod:
    """The method of the experts of the layer with this name. Raises ModelError where projections of one GEMM differ in
    quantization, and where the experts are of a kind that it does not know."""
    gate_up, (down,) = context.of_gemm(prefix, "experts_gate_up"), context.of_gemm(prefix, "experts_down")
    plain: type[ExpertMethod] = StackedExperts if down.transposed else GroupedExperts
    names = [[name.removesuffix(".weight") for tensor in gemm for name in tensor.expand()] for gemm in (gate_up, [down])]
    quantization, kinds = context.quantization, set[type[ExpertMethod]]()
    schemes = [None if quantization is None else require_uniform(quantization, each) for each in names]
    for scheme in schemes:
        path = None if scheme is None else scheme.expert_method
        if scheme is not None and path is None:
            raise ModelError(
                f"{prefix} has experts in {scheme.stored}", held=f"{scheme.stored} is read for dense layers only",
                next="use a checkpoint of this model in FP8 or int4",
            )  # fmt: skip
        kinds.add(plain if path is None else dotted_path.load(path, option="expert_method"))
    stored = " and ".join(dict.fromkeys("16 bit" if scheme is None else scheme.stored for scheme in schemes))
    method = kinds.pop()
    if kinds:
        raise ModelError(
            f"{prefix} has experts in {stored}", why="all projections of an expert run in one of them",
            next="use a checkpoint that quantizes all of them, or none",
        )  # fmt: skip
    if down.transposed and not issubclass(method, StackedExperts):
        raise ModelError(
            f"the experts of {prefix} cannot be loaded in {stored}", held="they have 16 bits, or 4 in MXFP4",
            why=f"GEMMs in {stored} have no biases of experts", next="use dtype='auto' or 'bf16'",
        )  # fmt: skip
    if context.batch_invariant and method is not GroupedExperts:
        raise ModelError(
            "deterministic does not work with this checkpoint on a GPU", held=f"{prefix} has experts in {stored}",
            why="GEMMs of experts whose tokens do not depend on the batch are there for 16 bit and FP8",
            next="leave deterministic out",
        )  # fmt: skip
    return method(gate_up, down, local, experts, context)
