# SPDX-License-Identifier: Apache-2.0
"""The application of a RayService: Ray Serve imports `build` in the cluster and calls it with the arguments of serveConfigV2."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from phalanx.deploy.serve_flags import read_arguments
from phalanx.errors import OptionError

REPLICAS = "phalanx.deploy.ray_serve"
"""The module with the replicas behind Ray Serve. It imports Ray, so it is loaded in the cluster only."""


def require_replicas() -> None:
    """Raise OptionError where this version of the package has no replicas for Ray Serve."""
    if importlib.util.find_spec(REPLICAS) is None:
        raise OptionError("with=ray is not possible", why=f"this version has no {REPLICAS}", next="leave it out")


def build(args: dict[str, Any]) -> Any:
    """The application. args: "arguments" (of `phalanx serve`, as a container has them) and "servers", the number of replicas.

    Raises OptionError for options that a replica cannot have.
    """
    replicas: Any = importlib.import_module(REPLICAS)
    ray_serve: Any = importlib.import_module("ray.serve")
    engine, serving = read_arguments(list(args["arguments"]))
    replicas.require_deployable(engine, serving)
    device = "cpu" if engine.device == "cpu" else "cuda"  # the head, which runs this, has no GPU to look at
    options = replicas.deployment_options(engine, serving, replicas.Scaling(args["servers"], args["servers"]), device)
    deployment = ray_serve.deployment(ray_serve.ingress(replicas.Forward())(replicas.Replica)).options(name="server", **options)
    values = engine.model_copy(update={"device": device}).model_dump(mode="json", exclude={"cluster_token", "cluster_token_file"})
    return deployment.bind(values, serving.model_dump(mode="json", exclude={"api_key"}), {})
