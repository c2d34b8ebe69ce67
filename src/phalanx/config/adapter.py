# SPDX-License-Identifier: Apache-2.0
"""adapter_config.json of a LoRA adapter (arXiv 2106.09685), as peft writes it: y = W x + scale * B (A x)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config.json_fields import FieldTable, JsonFields
from phalanx.errors import ModelError
from phalanx.log import get_logger

log = get_logger(__name__)

CONFIG = "adapter_config.json"
_MAX_BYTES = 1 << 20
_NO: tuple[Any, ...] = (False,)
_NONE: tuple[Any, ...] = ([], {}, False)

FIELDS = FieldTable.of(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules",
    # what narrows target_modules: the tensors of the file tell; and what only training reads
    "base_model_name_or_path revision task_type inference_mode auto_mapping peft_version exclude_modules layers_to_transform"
    " layers_pattern lora_dropout eva_config qalora_group_size runtime_config megatron_core loraplus_lr_ratio lora_ga_config"
    " use_kasa_init block_diagonal_nblocks velora_config",
    {
        "bias": ("none",), "lora_bias": _NO, "use_dora": _NO, "modules_to_save": _NONE, "fan_in_fan_out": _NO,
        "target_parameters": _NONE, "trainable_token_indices": _NONE, "layer_replication": _NONE, "megatron_config": _NONE,
        "alora_invocation_tokens": _NONE, "use_qalora": _NO, "use_bdlora": (None, False), "arrow_config": _NONE,
        "ensure_weight_tying": _NO, "loftq_config": _NONE, "corda_config": _NONE, "monteclora_config": _NONE,
        # others change the weights of the base, and so does an adapter that is not converted
        "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    },
)  # fmt: skip
"""What Phalanx does with each field."""


def json_object(file: Path) -> dict[str, Any]:
    """The object in a small file of an adapter. Raises ModelError."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ModelError(f"{file} is too large", held=f"it has more than {_MAX_BYTES:,} bytes")
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        next = "give the folder that holds it and adapter_model.safetensors"
        raise ModelError(f"{file} cannot be read", why=f"{type(error).__name__}: {error}", next=next) from None
    if not isinstance(values, dict):
        raise ModelError(f"{file} holds no JSON object")
    return values


@dataclass(frozen=True)
class AdapterConfig:
    """The ranks and scales of an adapter's modules. patterns: by the end of a module's name, whose first match counts."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    root_of_rank: bool = False
    target_modules: tuple[str, ...] | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> AdapterConfig:
        """Of the adapter in a folder. Raises ModelError for a file that cannot be read, and for what Phalanx does not compute."""
        file = folder / CONFIG
        return cls.from_values(json_object(file), str(file))

    @classmethod
    def from_values(cls, values: Mapping[str, Any], file: str = CONFIG) -> AdapterConfig:
        """Of the object in `file`."""
        kind = values.get("peft_type")
        if kind != "LORA":
            raise ModelError(f"{file} has peft_type={kind!r}", why="it must be 'LORA'", next="Phalanx computes LoRA adapters only")
        fields = JsonFields(values, file).sorted_by(FIELDS)
        if fields.additions:
            log.warning("%s: Phalanx knows nothing of %s: not used", file, ", ".join(fields.additions))
        targets = fields.value("target_modules")
        ranks, alphas = (fields.optional_mapping(name) or {} for name in ("rank_pattern", "alpha_pattern"))
        return cls(
            fields.count("r", 8), fields.positive("lora_alpha", 8.0),
            {_plain(key, f"{file}: rank_pattern"): fields.inner("rank_pattern", ranks).count(key) for key in ranks},
            {_plain(key, f"{file}: alpha_pattern"): fields.inner("alpha_pattern", alphas).positive(key) for key in alphas},
            fields.flag("use_rslora", False), tuple(fields.optional_texts("target_modules") or ()) if isinstance(targets, list)
            else None,
        )  # fmt: skip

    def rank_of(self, module: str) -> int:
        """Of the module with this name."""
        return next((rank for key, rank in self.rank_pattern.items() if _ends_with(module, key)), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of B A: alpha / rank, or, with rslora, alpha / sqrt(rank) (arXiv 2312.03732)."""
        alpha = next((alpha for key, alpha in self.alpha_pattern.items() if _ends_with(module, key)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.root_of_rank else rank)

    def targets(self, module: str) -> bool:
        """Whether target_modules names the module; a text there, which is a regular expression, is not looked at."""
        return self.target_modules is None or any(_ends_with(module, name) for name in self.target_modules)


def _plain(key: str, where: str) -> str:
    """The name that a pattern stands for. peft reads it as a regular expression; one from outside could take for ever."""
    name = key.removeprefix("^").removesuffix("$").replace(r"\.", ".")
    if not re.fullmatch(r"[\w.-]+", name):
        raise ModelError(
            f"{where} has the key {key!r}", why="only the names of modules, or their ends, are read here",
            next="write the names instead of a regular expression",
        )  # fmt: skip
    return name


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")
