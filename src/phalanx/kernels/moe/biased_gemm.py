# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The grouped GEMMs of experts with biases, or with weights of 4 bits, over the tiles of `sort_by_expert`: as `grouped_gemm`, with
weights in 16 or 32 bit, or in MXFP4, NVFP4 or 4-bit integers, which are widened in registers; and with biases and a clamped SwiGLU
in the epilogue. A widened integer is rounded once to x's dtype, as in `gemm.int4_gemm`; MXFP4 and NVFP4 are exact in bf16: the
scales of NVFP4's rows multiply the sums.

    inner[p, i] = swiglu(gate_e[i] . x[token of p] + gate_bias_e[i], up_e[i] . x[token of p] + up_bias_e[i])
    or max(up_e[i] . x[token of p] + up_bias_e[i], 0)^2                              of experts that are not gated
    out[q, h]   = down_e[h] . inner[p] + down_bias_e[h]                              e: the expert of pair p, whose number is q

The bias of `down` is added by the first of the programs that share a tile's columns (split-K), and by none where it is None."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.config.experts import ClampedSwiGlu
from phalanx.kernels.capabilities import gpu, sm_arch
from phalanx.kernels.gemm.int4_gemm import columns_at as int4_columns_at
from phalanx.kernels.gemm.int4_gemm import scales_of_step, widened_at
from phalanx.kernels.gemm.int4_packing import BLOCK, Int4Weight
from phalanx.kernels.gemm.int4_packing import TILE_ROWS as INT4_TILE_ROWS
from phalanx.kernels.moe import biased_heuristics
from phalanx.kernels.moe.grouped_gemm import gate_activation
from phalanx.kernels.moe.heuristics import BLOCK_K, ExpertTiling
from phalanx.kernels.moe.mxfp4 import columns_at, dequantized, nvfp4_unit, selectors, widened_nvfp4
from phalanx.kernels.moe.nvfp4_packing import Nvfp4Weight
from phalanx.kernels.moe.packing import SCALES_IN_WORD, TILE_ROWS
from phalanx.kernels.moe.reference import MXFP4_BLOCK
from phalanx.kernels.moe.sort_by_expert import TILE_FIELDS, Tiles, tile_at
from phalanx.kernels.moe.tensors import GATED_ACTIVATIONS, ExpertActivation, ExpertTensors
from phalanx.kernels.vectors import nearest

BLOCK_COLUMNS = tl.constexpr(BLOCK_K)
"""Columns of one k step: four blocks of MXFP4, whose scales are one word."""
BLOCK_WORDS = tl.constexpr(MXFP4_BLOCK // 4)
"""16-bit words of one block of MXFP4: 16 bytes, so that rows begin on multiples of these."""
TILE, SCALES = tl.constexpr(TILE_ROWS), tl.constexpr(SCALES_IN_WORD)
INT4_ROWS, INT4_WORDS = tl.constexpr(INT4_TILE_ROWS), tl.constexpr(BLOCK)


@triton.jit
def _dot(w, v, total, SM: tl.constexpr):
    """total + w [rows, columns] times v [tokens, columns], transposed. Triton's interpreter multiplies no bf16."""
    if SM == 0:
        w, v = w.to(tl.float32), v.to(tl.float32)
    return tl.dot(w.to(v.dtype), tl.trans(v), total, input_precision="ieee")


@triton.jit
def _columns(row, valid, column, inputs, FULL: tl.constexpr):
    """x at these columns [1, n] of rows that begin at `row` [TOKENS, 1], as far as they are `valid`: a tile of few pairs reads no
    more than theirs."""
    return tl.load(row + column, valid, 0.0) if FULL else tl.load(row + column, valid & (column < inputs), 0.0)


@triton.jit
def _k_step(
    total, x_row, valid, weight, scale, selectors, shift, weight_row, block, inputs, row_blocks, row_scales, rows,
    FORM: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FULL: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """total + columns block * 128 .. of weight_row [rows] times those of x."""
    first = block * BLOCK_COLUMNS
    if FORM == "int4":
        row = weight_row[:, None]
        place = (row % INT4_ROWS).to(tl.int32) * INT4_WORDS + tl.arange(0, INT4_WORDS)[None, :]
        tile = weight + row // INT4_ROWS * row_blocks * (INT4_ROWS * INT4_WORDS) + (block * (INT4_ROWS * INT4_WORDS) + place)
        words = tl.load(tile)
        a, b, c, d = scales_of_step(scale, block, weight_row, rows, GROUP, ZEROS)
        for step in tl.static_range(4):
            value = widened_at(
                words, a if step < 2 else b, c if step < 2 else d, step, GROUP >= BLOCK_COLUMNS, ZEROS, x_row.dtype.element_ty, SM
            )  # fmt: skip
            total = _dot(value, _columns(x_row, valid, first + int4_columns_at(step), inputs, FULL), total, SM)
    elif FORM == "mxfp4" or FORM == "nvfp4":
        group, row = (weight_row // TILE)[:, None], (weight_row % TILE).to(tl.int32)[:, None]
        at, width = tl.arange(0, BLOCK_COLUMNS // 4)[None, :], BLOCK_COLUMNS // 4
        place = row * width + at
        if not FULL:  # the last tile may have fewer columns
            width = tl.minimum(row_blocks - block * SCALES, SCALES) * BLOCK_WORDS
            place = tl.where(width < BLOCK_COLUMNS // 4, row * ((row_blocks - 1) % SCALES + 1) * BLOCK_WORDS + at, place)
        tile = weight + group * row_blocks * (TILE * BLOCK_WORDS) + (block * (BLOCK_COLUMNS // 4 * TILE) + place)
        words = tl.load(tile) if FULL else tl.load(tile, at < width, 0)
        if FORM == "mxfp4":
            scales = tl.load(scale + weight_row // TILE * (TILE * row_scales) + weight_row % TILE + block * TILE)
            a, b, c, d = dequantized(words, scales, selectors, shift, SM)
        else:  # eight scales of a row in a k step: the first halves' of its four blocks, and the last halves'
            low = scale + weight_row // TILE * (TILE * row_scales) + weight_row % TILE + block * (2 * TILE)
            a, b, c, d = widened_nvfp4(words, tl.load(low), tl.load(low + TILE), selectors, x_row.dtype.element_ty, SM)
        total = _dot(a, _columns(x_row, valid, first + columns_at(0), inputs, FULL), total, SM)
        total = _dot(b, _columns(x_row, valid, first + columns_at(1), inputs, FULL), total, SM)
        total = _dot(c, _columns(x_row, valid, first + columns_at(2), inputs, FULL), total, SM)
        total = _dot(d, _columns(x_row, valid, first + columns_at(3), inputs, FULL), total, SM)
    else:
        column = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
        place = weight + weight_row[:, None] * inputs + column
        w = tl.load(place) if FULL else tl.load(place, column < inputs, 0.0)
        total = _dot(w, _columns(x_row, valid, column, inputs, FULL), total, SM)
    return total


@triton.jit
def _sums(
    total, x_row, valid, weight, scale, selectors, shift, weight_row, first, end, inputs, row_blocks, row_scales, rows,
    FORM: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FULL: tl.constexpr, APART: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """total + all steps first .. end - 1. APART: the last columns, where they are fewer, are a step of their own: with their masks
    in the loop, a step takes a tenth more instructions, and ptxas waits for each product of warpgroups before the next."""
    full = inputs // BLOCK_COLUMNS
    for block in range(first, tl.minimum(end, full) if APART else end):
        total = _k_step(
            total, x_row, valid, weight, scale, selectors, shift, weight_row, block, inputs, row_blocks, row_scales, rows, FORM,
            GROUP, ZEROS, FULL or APART, SM,
        )  # fmt: skip
    if APART:  # noqa: SIM102 (known when compiled)
        if end > full:
            total = _k_step(
                total, x_row, valid, weight, scale, selectors, shift, weight_row, full, inputs, row_blocks, row_scales, rows,
                FORM, GROUP, ZEROS, False, SM,
            )  # fmt: skip
    return total


@triton.jit
def _swiglu(gate, up, alpha, limit, FIRST: tl.constexpr):
    """As `ClampedSwiGlu`, or the gate's activation times up."""
    if FIRST == "clamped":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        result = gate / (1.0 + tl.exp(-alpha * gate)) * up
    else:
        result = gate_activation(gate, FIRST == "gelu") * up
    return result


@triton.jit
def _activated(total, alpha, limit, FIRST: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Sums of gate and up, or of up alone, [.., TOKENS] -> [ROWS, TOKENS]; those of `down` stay as they are."""
    if FIRST != "" and FIRST != "squared":
        gate, up = tl.split(tl.permute(tl.reshape(total, [ROWS // 8, 2, 8, TOKENS]), [0, 2, 3, 1]))
        total = tl.reshape(_swiglu(gate, up, alpha, limit, FIRST), [ROWS, TOKENS])
    elif FIRST == "squared":
        total = tl.maximum(total, 0.0)
        total *= total
    return total


@triton.jit
def _with_bias(total, bias, row, part):
    """total [ROWS, tokens] and, in the first part, the bias of its rows."""
    if bias is not None:
        total += tl.where(part == 0, tl.load(bias + row).to(tl.float32), 0.0)[:, None]
    return total


@triton.jit
def _weight_row(expert, tile_n, outputs, rows, GATED: tl.constexpr, ROWS: tl.constexpr):
    """The rows of a tile, counted through all experts; those beyond the last repeat the last. GATED: eight rows of gate alternate
    with eight of up, so that a thread's sums are of both, and neighbours read one run."""
    if GATED:
        both = tl.arange(0, 2 * ROWS)
        row = tl.minimum(tile_n * ROWS + both // 16 * 8 + both % 8, outputs - 1) + both // 8 % 2 * outputs
        result = expert * (outputs * 2 if rows is None else rows) + row
    else:
        row = tl.minimum(tile_n * ROWS + tl.arange(0, ROWS), outputs - 1)
        result = expert * (outputs if rows is None else rows) + row
    return result


@triton.jit
def _tile_of(program, tiles_most, outputs, ROWS: tl.constexpr, BESIDE: tl.constexpr):
    """-> (the tile of pairs, that of rows); as `grouped_gemm` orders them."""
    tiles_n = tl.cdiv(outputs, ROWS)
    group = program // (BESIDE * tiles_most)
    beside = tl.minimum(tiles_n - group * BESIDE, BESIDE)
    in_group = program % (BESIDE * tiles_most)
    return in_group // beside, group * BESIDE + in_group % beside


@triton.jit(do_not_specialize=["count", "tiles_most", "row_blocks", "row_scales", "blocks", "part_blocks"])
def _biased_gemm(
    x, weight, scale, row_scale, selector_table, bias, out, pairs, tiles, num_tiles, count, tiles_most, outputs, inputs, row_blocks,
    row_scales, rows, blocks, part_blocks, alpha, limit, TOP_K: tl.constexpr, FIRST: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, FULL: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, BESIDE: tl.constexpr, IN_ORDER: tl.constexpr, FIELDS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """FIRST: see `activation` of `biased_gemm`. With one: x [T, inputs], out [count, outputs] in sorted order. "": x
    [count, inputs] in sorted order, out [count, outputs] or fp32 [parts, count, outputs] by the pairs' numbers.

    row_blocks, row_scales: of a row in MXFP4, blocks of 32 values and words of four scales; in 4-bit integers, k steps and words of
    scales. rows: in 4-bit integers, those of an expert with padding. FORM: "plain", "mxfp4", "nvfp4" or "int4". GROUP, ZEROS: see
    `Int4Weight`. IN_ORDER: see `Tiles`.

    The launch that is not FIRST has the tiles of the FIRST one before it, and may begin once that one has waited for them: it reads
    them before its own wait."""
    GATED: tl.constexpr = FIRST != "" and FIRST != "squared"
    if SM >= 90 and FIRST != "":
        gdc_wait()
    if SM >= 90:
        gdc_launch_dependents()
    part = tl.program_id(1)
    tile, tile_n = _tile_of(tl.program_id(0), tiles_most, outputs, ROWS, BESIDE)
    existing = tl.load(num_tiles)
    expert, position, size = tile_at(tiles, tile, FIELDS)
    selectors = tl.load(selector_table + tl.arange(0, 32)) if FORM == "mxfp4" or FORM == "nvfp4" else None
    shift = tl.load(selector_table + 32 + tl.arange(0, 1)) if FORM == "mxfp4" else None
    if SM >= 90 and FIRST == "":
        gdc_wait()
    if tile >= existing:
        return
    lane = tl.arange(0, TOKENS)
    # Pairs and rows beyond the last repeat the last, and are not stored.
    position += tl.maximum(tl.minimum(lane, size - 1), 0)
    pair = position if IN_ORDER else tl.load(pairs + position)
    source = (pair // TOP_K if FIRST != "" else position).to(tl.int64)
    x_row, valid = x + source[:, None] * inputs, (lane < size)[:, None]
    row = tile_n * ROWS + tl.arange(0, ROWS)
    weight_row = _weight_row(expert, tile_n, outputs, rows, GATED, ROWS)
    total = tl.zeros([2 * ROWS if GATED else ROWS, TOKENS], tl.float32)
    if FORM == "int4":  # the tables of experts are apart, and rows are counted through all of them
        scale += expert.to(tl.int64) * rows * (row_scales - 1)
    # Large tiles lack the registers for a step apart.
    APART: tl.constexpr = not FULL and (TOKENS <= 64 or (GATED and SM >= 90))
    total = _sums(
        total, x_row, valid, weight, scale, selectors, shift, weight_row, part * part_blocks,
        tl.minimum((part + 1) * part_blocks, blocks), inputs, row_blocks, row_scales, rows, FORM, GROUP, ZEROS, FULL,
        APART, SM,
    )  # fmt: skip
    if row_scale is not None:
        UNIT: tl.constexpr = nvfp4_unit(x.dtype.element_ty, SM)
        total *= (tl.load(row_scale + weight_row) * UNIT)[:, None]
    total = _with_bias(total, bias, weight_row, part)
    total = _activated(total, alpha, limit, FIRST, ROWS, TOKENS)
    target = position.to(tl.int64) if FIRST != "" else pair.to(tl.int64) + part.to(tl.int64) * count
    place = out + target[None, :] * outputs + row[:, None]
    inside = (row < outputs)[:, None] & (lane < size)[None, :]
    if PARTS:
        tl.store(place, total, inside)
    else:
        tl.store(place, nearest(total, tl.zeros([ROWS, TOKENS], out.dtype.element_ty), SM), inside)


class _Operand(NamedTuple):
    """A weight as the kernel takes it: see its arguments of these names. outputs: of an expert, gate and up together."""

    weight: Tensor
    scale: Tensor | None
    row_scale: Tensor | None
    selectors: Tensor | None
    outputs: int
    row_blocks: int
    row_scales: int
    rows: int | None
    form: dict[str, Any]

    @classmethod
    def of(cls, weight: Tensor | Int4Weight | Nvfp4Weight, scale: Tensor | None, experts: int, inputs: int) -> _Operand:
        if isinstance(weight, Int4Weight):
            form = {"FORM": "int4", "GROUP": weight.group, "ZEROS": weight.zeros}
            blocks, row_scales = triton.cdiv(inputs, BLOCK_K), weight.scales[0].numel() // weight.rows
            return cls(weight.words, weight.scales, None, None, weight.outputs, blocks, row_scales, weight.rows, form)
        if isinstance(weight, Nvfp4Weight):
            form = {"FORM": "nvfp4", "GROUP": 0, "ZEROS": False}
            words, scales, blocks = weight.words.view(torch.int16), weight.scales.view(torch.int32), weight.words.shape[-1] // 16
            table = selectors(words.device)
            return cls(words, scales, weight.row_scale, table, weight.outputs, blocks, scales.shape[-1], weight.rows, form)
        outputs, blocks = weight.shape[0] // experts, inputs // MXFP4_BLOCK
        form = {"FORM": "plain" if scale is None else "mxfp4", "GROUP": 0, "ZEROS": False}
        if scale is None:
            return cls(weight, None, None, None, outputs, blocks, 0, None, form)
        words = scale.view(torch.int32)
        return cls(weight.view(torch.int16), words, None, selectors(weight.device), outputs, blocks, words.shape[1], None, form)


def biased_gemm(
    x: Tensor, weight: Tensor | Int4Weight | Nvfp4Weight, scale: Tensor | None, bias: Tensor | None, tiles: Tiles,
    tiling: ExpertTiling, *, top_k: int, experts: int, activation: ExpertActivation = "", swiglu: ClampedSwiGlu | None = None,
) -> Tensor:  # fmt: skip
    """activation: of x [T, H] times each expert's gate, times its up, weight [experts * 2 * I, H] ("clamped": see `ClampedSwiGlu`);
    "squared": of x times up alone, [experts * I, H] -> [P, I] in sorted order, in x's dtype. "": x [P, I] in sorted order times
    down, weight [experts * H, I] -> [parts, P, H] by the pairs' numbers, in fp32 where parts > 1.

    weight, scale, bias: as of `ExpertTensors`. Rows of pairs with experts of other ranks are not written."""
    inputs, count, sm = x.shape[1], tiles.pairs.numel(), sm_arch(x.device)
    operand = _Operand.of(weight, scale, experts, inputs)
    outputs = operand.outputs // (2 if activation in GATED_ACTIVATIONS else 1)
    blocks = triton.cdiv(inputs, BLOCK_K)
    part_blocks = triton.cdiv(blocks, tiling.parts)
    parts = triton.cdiv(blocks, part_blocks)
    shape = (count, outputs) if activation else (parts, count, outputs)
    out = torch.empty(shape, dtype=torch.float32 if parts > 1 else x.dtype, device=x.device)
    alpha, limit = swiglu or (0.0, 0.0)
    _biased_gemm[(tiles.most * triton.cdiv(outputs, tiling.rows), parts)](
        x, operand.weight, operand.scale, operand.row_scale, operand.selectors, bias, out, *tiles[:3], count, tiles.most, outputs,
        inputs, operand.row_blocks, operand.row_scales, operand.rows, blocks, part_blocks, alpha, limit, TOP_K=top_k,
        FIRST=activation, **operand.form, FULL=inputs % BLOCK_K == 0, PARTS=parts > 1, ROWS=tiling.rows,
        TOKENS=tiling.tokens, BESIDE=tiling.beside, IN_ORDER=tiles.in_order, FIELDS=TILE_FIELDS, SM=sm, num_warps=tiling.warps,
        num_stages=tiling.stages, launch_pdl=sm >= 90,
    )  # fmt: skip
    return out


def biased_experts(x: Tensor, experts: ExpertTensors, tiles: Tiles, tokens: int, top_k: int, num_experts: int) -> Tensor:
    """x [T, H] -> what `experts` give each pair, [parts, T * top_k, H]. tokens: of a tile; num_experts: of the layer."""
    device = gpu(x.device)
    pairs = (1 << (len(x) - 1).bit_length()) * top_k  # of a power of 2 of tokens: variants change there only
    busy = min(num_experts, pairs) * experts.count // num_experts or 1  # of this rank's experts, where all are alike
    kind: dict[str, Any] = {
        "in_4_bits": experts.in_4_bits, "num_sms": device.num_sms, "sm": device.sm, "itemsize": x.element_size(),
    }  # fmt: skip
    of_layer: dict[str, Any] = {"top_k": top_k, "experts": experts.count, "swiglu": experts.swiglu}
    first = biased_heuristics.select(busy, tokens, experts.inner, experts.hidden, gated=experts.gated, **kind)
    gate_up, down = experts.packed or (experts.gate_up, experts.down)
    inner = biased_gemm(
        x, gate_up, experts.gate_up_scale, experts.gate_up_bias, tiles, first._replace(parts=1),
        activation=experts.activation, **of_layer,
    )  # fmt: skip
    second = biased_heuristics.select(busy, tokens, experts.hidden, experts.inner, gated=False, **kind)
    return biased_gemm(inner, down, experts.down_scale, experts.down_bias, tiles, second, **of_layer)
