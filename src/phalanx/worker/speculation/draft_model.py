# SPDX-License-Identifier: Apache-2.0
"""`DraftModel`: a language model of the target's vocabulary, split over the same tensor-parallel group, as a `Drafter`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from phalanx.layout.cache import Cache
from phalanx.models import weights
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.decoder import Decoder
from phalanx.models.weights import Progress


class DraftModel(nn.Module):
    """A `Drafter` that reads tokens alone."""

    reads_next = False
    inner_layers: tuple[int, ...] = ()

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        assert model.lm_head is not None, "a draft model is one stage"
        self.model, self.context, self.width = model, model.context, model.shape.hidden_size
        self._lm_head = (model.lm_head,)  # in a tuple: it is the model's

    def declared_caches(self) -> list[Cache]:
        """As `Drafter`."""
        return self.model.declared_caches()

    def first_states(self, inner: Tensor | None) -> Tensor | None:
        """As `Drafter`."""
        return None

    def hidden_states(self, batch: Batch, caches: Sequence[LayerCache], states: Tensor | None) -> Tensor:
        """As `Drafter`."""
        return self.model.hidden_states(batch, caches)

    def most_likely(self, states: Tensor) -> Tensor:
        """As `Drafter`."""
        lm_head = self._lm_head[0]
        return lm_head.argmax(lm_head.local(states))

    def load(self, folder: Path, progress: Progress | None = None) -> None:
        """Read its checkpoint. Raises WeightError, as `weights.load`."""
        weights.load(self.model, folder, progress)
