# SPDX-License-Identifier: Apache-2.0
"""`python -m phalanx.deploy.server_child`: the server as the child of another process (`launch.start`), with which it ends.

Its config: "engine" (of EngineOptions), "serving" (of ServeOptions).
"""

from __future__ import annotations

import sys

from phalanx import launch
from phalanx.config.options import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.serve.app import run

MODULE = "phalanx.deploy.server_child"

if __name__ == "__main__":
    config = launch.read_config()
    sys.exit(run(EngineOptions.of(**config["engine"]), ServeOptions.of(**config["serving"])))
