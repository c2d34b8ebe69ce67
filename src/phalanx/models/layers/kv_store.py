# SPDX-License-Identifier: Apache-2.0
"""Keys and values on their way into the cache: as they are, or in e4m3 with one scale for a layer's keys and one for its values."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx import kernels
from phalanx.models.batch import KvCache
from phalanx.models.slices import Scale, Seat, Slice, Sliced


class KvStore(Sliced):
    """Writes one layer's cache. `read_scales`: what its keys and values are to be multiplied by when read, None for 1.

    Scales come from the checkpoint where it was made for an FP8 cache; 1 otherwise, as keys and values stay well within +-448.
    """

    def __init__(self, name: str, *, seat: Seat) -> None:
        super().__init__()
        self.name, self.seat = name, seat
        self.read_scales: tuple[float, float] | None = None

    def forward(self, key: Tensor, value: Tensor, cache: KvCache, slots: Tensor) -> None:
        """key and value [T, kv_heads, head_dim] into slots [T] (see `Batch.kv_slots`)."""
        if self.seat.fp8_cache:
            key_scale, value_scale = self.read_scales or (1.0, 1.0)
            key, value = _shrunk(key, key_scale, cache.key), _shrunk(value, value_scale, cache.value)
        kernels.write_kv(key, value, cache.key, cache.value, slots)

    def slices(self) -> Iterator[Slice]:
        return iter(())

    def scales(self) -> Iterator[Scale]:
        quantization = self.seat.quantization
        if quantization is None or not quantization.kv or not self.seat.fp8_cache:
            return
        inner = ("k_proj.", "v_proj.") if quantization.method == "modelopt" else ("", "")
        yield Scale(f"{self.name}.{inner[0]}k_scale", ((), (1,)), lambda scale: self._keep(scale, 0), optional=True)
        yield Scale(f"{self.name}.{inner[1]}v_scale", ((), (1,)), lambda scale: self._keep(scale, 1), optional=True)

    def _keep(self, scale: Tensor, at: int) -> None:
        held = list(self.read_scales or (1.0, 1.0))
        held[at] = float(scale)
        self.read_scales = None if held == [1.0, 1.0] else (held[0], held[1])


def _shrunk(x: Tensor, scale: float, cache: Tensor) -> Tensor:
    # Out of range is clipped: e4m3 has no infinity, and a plain cast gives NaN.
    scaled = x if scale == 1.0 else x.float() * (1.0 / scale)
    return scaled.clamp(-448.0, 448.0).to(cache.dtype)
