# SPDX-License-Identifier: Apache-2.0
"""A fake rank of a benchmark: no torch. It reports the samples of PHALANX_TEST_SAMPLES, and has the faults that
PHALANX_TEST_FAULTS names.

{task: "hang" | "die" | "raise"}; a rank other than 0 does nothing but wait for the end.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from phalanx.launch import read_config
from phalanx.tune.ranks.rank_process import Events, _await


def main() -> None:
    config = read_config()
    folder, rank = Path(config["folder"]), config["rank"]
    if rank > 0:
        while '"end"' not in _await(folder / "events.0"):
            time.sleep(0.02)
        return
    faults = json.loads(Path(os.environ["PHALANX_TEST_FAULTS"]).read_text())
    events = Events(folder, rank)
    events.send(hello=f"sm0.shm.tp{config['world']}", facts={"cpu": "a fake one"})
    for task in json.loads(_await(folder / "work")):
        events.send(begin=task)
        if faults.get(task) == "hang":
            time.sleep(600)
        elif faults.get(task) == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif faults.get(task) == "raise":
            events.send(error="ArithmeticError: a kernel said no", lost_peer=False)
            os._exit(1)
        events.send(task=task, samples=json.loads(os.environ["PHALANX_TEST_SAMPLES"])[: config["method"]["replays"]])
    events.send(end=True)


if __name__ == "__main__":
    main()
