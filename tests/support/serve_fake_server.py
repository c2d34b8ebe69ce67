# SPDX-License-Identifier: Apache-2.0
"""`phalanx serve` over the engine process with its fake executor: the real server, the real engine, no model's arithmetic.

Run with one argument, JSON: {"engine": fields of EngineOptions, "serving": fields of ServeOptions, "fake": what the fake executor
is given, for example {"latency": 0.01}}.
"""

from __future__ import annotations

import functools
import json
import sys

from phalanx.__main__ import open_standard_descriptors
from phalanx.comm import launch
from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.engine.executor import FAKE_EXECUTOR
from phalanx.serve.app import run
from phalanx.serve.client import EngineClient


def main() -> int:
    open_standard_descriptors()
    config_json = json.loads(sys.argv[1])
    begin = launch.start

    def start(module, config, title, **more):
        if module == "phalanx.engine":
            config = {**config, "fake": config_json.get("fake", {})}
        return begin(module, config, title, **more)

    launch.start = start
    engine, serving = EngineOptions.of(**config_json["engine"]), ServeOptions.of(**config_json["serving"])
    return run(engine, serving, start=functools.partial(EngineClient.start, executor=FAKE_EXECUTOR))


if __name__ == "__main__":
    sys.exit(main())
