# SPDX-License-Identifier: Apache-2.0
"""A trained EAGLE-3 head in the engine, one request at a time: how often the draft at each place is accepted, tokens of a
step, whether tokens are those without drafts, and what a token costs, at temperature 0 and 0.7.

    python -m benchmarks.engine.trained_head MODEL HEAD --out DIR [--prompts FILE] [--drafts 4]

Prompts are one in a line of FILE; else every 14th of the built-in ones of scripts/train_eagle3.py from `--first` on: those before
it are what the head was trained on. Seconds are of the clock; cpu_ms is user and system time of the engine's processes, which
others on the machine change little.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from phalanx import LLM, SamplingParams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("head")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--first", type=int, default=0, help="of the built-in prompts")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--name", default="engine_trained_head", help="of the file of figures")
    parser.add_argument("--note", default="", help="on the head's training, for the file")
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    args = parser.parse_args()
    prompts = read_prompts(args)[: args.count]
    config = {
        "method": "eagle3", "model": args.head, "num_speculative_tokens": args.drafts,
        "num_speculative_tokens_per_batch_size": [[1, 4096, args.drafts]],
    }  # fmt: skip
    answers, figures = {}, dict[str, Any]()
    for name, speculative in (("none", None), ("eagle3", config)):
        with LLM(
            args.model, device=args.device, dtype=args.dtype, max_batch_size=1, max_seq_len=1024, speculative_config=speculative,
            enable_prefix_caching=False,
        ) as llm:  # fmt: skip
            run(llm, prompts[:1], 0.0, 16)
            for temperature in (0.0, 0.7):
                key = f"temperature {temperature:g}"
                answers[name, key], figures.setdefault(key, {})[name] = run(llm, prompts, temperature, args.tokens)
                print(key, name, figures[key][name], flush=True)
    for key, each in figures.items():
        pairs = zip(answers["none", key], answers["eagle3", key], strict=True)
        each["requests_with_other_tokens"] = sum(one != other for one, other in pairs)
        print(key, "requests with other tokens:", each["requests_with_other_tokens"], flush=True)
    facts = {"note": args.note, "dtype": args.dtype, "prompts": len(prompts), "drafts": args.drafts, "max_tokens": args.tokens}
    print(f"written: {harness.write(args.name, facts | figures, args.out)}")
    return 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts is not None:
        return [line.strip() for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    spec = importlib.util.spec_from_file_location("train_eagle3", harness.ROOT / "scripts" / "train_eagle3.py")
    assert spec is not None
    assert spec.loader is not None
    script = sys.modules["train_eagle3"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    prompts = [task.replace("{}", subject) for subject in script.SUBJECTS for task in script.TASKS]
    return prompts[args.first :: 14]


def run(llm: LLM, prompts: Sequence[str], temperature: float, tokens: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Of requests one after the other: their tokens, and the figures."""
    before, began, cpu, outputs = llm.stats(), time.perf_counter(), cpu_seconds(), []
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed)
        output = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)
        outputs.append(list(output.outputs[0].token_ids))
    seconds, cpu, after = time.perf_counter() - began, cpu_seconds() - cpu, llm.stats()
    count, drafted = sum(map(len, outputs)), after.drafts - before.drafts
    accepted = [now - then for now, then in zip(after.accepted_tokens, before.accepted_tokens, strict=True)]
    figures: dict[str, Any] = {
        "tokens": count, "steps": after.steps - before.steps, "ms_per_token": round(1e3 * seconds / count, 2),
        "cpu_ms_per_token": round(1e3 * cpu / count, 2),
    }  # fmt: skip
    if drafted:
        tried = [drafted, *accepted[:-1]]
        figures["rows_with_drafts"] = drafted
        figures["tokens_per_row"] = round(1 + sum(accepted) / drafted, 3)
        figures["accepted_if_those_before_are"] = [round(one / max(of, 1), 3) for one, of in zip(accepted, tried, strict=True)]
    return outputs, figures


def cpu_seconds() -> float:
    """User and system time of the processes that descend from this one."""
    parents, times = dict[int, int](), dict[int, float]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(fields[1])
        times[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descends(process: int) -> bool:
        while process in parents:
            process = parents[process]
            if process == os.getpid():
                return True
        return False

    return sum(seconds for process, seconds in times.items() if descends(process))


if __name__ == "__main__":
    sys.exit(main())
