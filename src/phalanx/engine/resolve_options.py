# SPDX-License-Identifier: Apache-2.0
"""Concrete options for a model on this machine: the same on every host, since the ranks compare them."""

from __future__ import annotations

from itertools import chain

from phalanx.config.dotted_path import launcher_class
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.resolve import ResolvedOptions, resolve
from phalanx.errors import OptionError
from phalanx.hardware.probe import usable_machine
from phalanx.layout.cache import default_snapshots, request_bytes
from phalanx.layout.draft import draft_network
from phalanx.layout.families import model_cache
from phalanx.layout.layout import Layout, require_suits


def resolve_options(options: EngineOptions) -> tuple[ModelShape, ResolvedOptions]:
    """The model's shape, and the options with neither "auto" nor None left in them.

    Raises OptionError, LayoutError or ModelError for options that cannot work.
    """
    shape = ModelShape.from_folder(locate(options.model, options.revision)).with_drafts(options.max_drafts)
    resolved = resolve(options, shape, *_gpus(options))
    require_suits(Layout.of(options), shape)
    draft_network(options, shape, quiet=False)
    caches = model_cache(shape)
    if options.speculation is not None and any(each.per == "request" and not each.revocable for each in chain(*caches)):
        raise OptionError(
            "speculative_config does not work with this model", held=f"it is a {shape.architecture}",
            why="some layers keep a state of each request, which a rejected draft would have changed", next="leave it out",
        )  # fmt: skip
    resolved = _with_snapshots(resolved, shape, keeps_state=request_bytes(caches) > 0)
    if options.kv_host_memory and not resolved.options.enable_prefix_caching:
        raise OptionError(
            f"kv_host_memory={options.kv_host_memory} does nothing",
            held=f"enable_prefix_caching is {resolved.reasons.get('enable_prefix_caching', 'False')}",
            why="no block is found again", next="leave one of them out",
        )  # fmt: skip
    return shape, resolved


def _with_snapshots(resolved: ResolvedOptions, shape: ModelShape, *, keeps_state: bool) -> ResolvedOptions:
    """state_snapshots is set: 0 where there is no state, or enable_prefix_caching is off."""
    options, reasons = resolved.options, dict(resolved.reasons)
    number, changed = options.state_snapshots, {}
    if number and not keeps_state:
        raise OptionError(
            f"state_snapshots={number} does nothing with this model", held=f"it is a {shape.architecture}",
            why="no layer keeps a state of each request", next="leave it out",
        )  # fmt: skip
    if keeps_state and number and not options.enable_chunked_prefill:
        raise OptionError(
            f"state_snapshots={number} does nothing", held="enable_chunked_prefill is off",
            why="a prompt that is not cut ends no step where its state could be kept", next="leave one of them out",
        )  # fmt: skip
    if not keeps_state or not options.enable_prefix_caching:
        changed = {"state_snapshots": 0}
    elif not options.enable_chunked_prefill:
        changed = {"state_snapshots": 0, "enable_prefix_caching": False}
        reasons["enable_prefix_caching"] = "False: some layers keep a state of each request, and prompts are not cut to keep it"
    elif number == 0:
        changed = {"enable_prefix_caching": False}
        reasons["enable_prefix_caching"] = "False: some layers keep a state of each request, and state_snapshots is 0"
    elif number is None:
        chosen = default_snapshots(options.max_batch_size)
        changed = {"state_snapshots": chosen}
        reasons["state_snapshots"] = f"{chosen}: half of max_batch_size"
    return ResolvedOptions(options.model_copy(update=changed), reasons)


def _gpus(options: EngineOptions) -> tuple[int, str]:
    """GPUs of a host of ranks, and which of them cannot be used, and why: of this one, unless the launcher finds the hosts (see
    `executor.launcher.ClusterLauncher`)."""
    gpus_per_host = getattr(launcher_class(options), "gpus_per_host", None)
    if gpus_per_host is not None:
        return int(gpus_per_host(options)), ""
    machine = usable_machine(options.device)
    return len(machine.gpus), machine.unusable
