# SPDX-License-Identifier: Apache-2.0
"""`phalanx serve` over the engine process with its fake executor: the real server, the real engine, no model's arithmetic.

Run with one argument, JSON: {"engine": fields of EngineOptions, "serving": fields of ServeOptions, "fake": what the fake executor
is given, for example {"latency": 0.01}}. With "delays", a folder, the delays of both loops are recorded in its files `loop` and
`turns` (`tests.support.loop_delays`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from phalanx import launch
from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.engine.executor import FAKE_EXECUTOR
from phalanx.serve.app import run
from phalanx.serve.client import EngineProcessClient, MakeVocabulary
from tests.support.loop_delays import watch_loop


def main() -> int:
    config_json = json.loads(sys.argv[1])
    begin = launch.start

    def start(module, config, title, **more):
        if module == "phalanx.engine":
            config = {**config, "fake": config_json.get("fake", {})}
        return begin(module, config, title, **more)

    launch.start = start
    delays, executor, watching = config_json.get("delays"), FAKE_EXECUTOR, []
    if delays is not None:
        executor = "tests.support.loop_delays:TimedFakeExecutor"
        config_json.setdefault("fake", {})["turns"] = f"{delays}/turns"

    async def start_engine(options: EngineOptions, vocabulary: MakeVocabulary | None = None) -> EngineProcessClient:
        if delays is not None:
            watching.append(asyncio.create_task(watch_loop(Path(delays, "loop"))))
        return await EngineProcessClient.start(options, executor=executor, vocabulary=vocabulary)

    engine, serving = EngineOptions.of(**config_json["engine"]), ServeOptions.of(**config_json["serving"])
    return run(engine, serving, start=start_engine)


if __name__ == "__main__":
    sys.exit(main())
