# SPDX-License-Identifier: Apache-2.0
"""Two engines of one model and layout, the plain path and the fast path, with the same prompts; both are compared with a reference.

The plain path: eager steps, NCCL sums, and norms as separate kernels. The fast path: all defaults. Both start at the same time,
while the reference is computed on the host, and run one after the other.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.gpu_jobs import turn
from phalanx import LLM, SamplingParams
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.config.resolve import compute_dtype
from phalanx.engine.messages import DECODE_GRAPH, EAGER, MIXED_GRAPH, STEP_KINDS
from tests.gpu import forced_prompts
from tests.gpu.forced_prompts import Entry, ForcedPrompt, Generate
from tests.gpu.logprob_distance import Limits, Truth, judge
from tests.gpu.reference_logprobs import Change, log_probabilities, sensitivities

PLAIN: dict[str, Any] = {"cuda_graphs": False, "allreduce_strategy": "NCCL"}
MAX_BATCH, MAX_TOKENS, MAX_SEQ = 160, 4096, 640
BURSTS = ((1, 6), (6, 40))  # prefixes at once, and how often, before all that are left
LARGE_STEP = 2048
MUST_RUN = ("ONESHOT/", "RS_NORM_AG/")  # all-reduces, where ranks sum
GRAPHS = (DECODE_GRAPH, MIXED_GRAPH)
BATCHES = ((1, 4), (3, 12), (128, 128))  # (answers at once, answers in all), compared token by token


@dataclass(frozen=True)
class Texts:
    """The prompts of a job. prompts, answers: of the training data; empty for models other than the demo."""

    short: list[ForcedPrompt]
    long: list[ForcedPrompt]
    cuts: int
    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, *, short: int, long: int, cuts: int, answers: int) -> Texts:
        taught = forced_prompts.taught(answers) if name == "demo" and answers else ([], [])
        return cls(*forced_prompts.make_prompts(name, short, long), cuts, *taught)

    @property
    def forced(self) -> list[ForcedPrompt]:
        return [*self.short, *self.long]

    @property
    def rows(self) -> list[list[int]]:
        """All rows for which the reference has log probabilities: the forced ones, then the training data."""
        taught = [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]
        return [*(row.tokens for row in self.forced), *taught]


@dataclass
class Observed:
    """Results of one path. parts: entries by "prefill", "decode", "prompts". others, answers: how many answers had another token,
    of how many. steps: by burst, a lower bound of the tokens in the largest step. allreduce, ran: counts of all-reduces and of
    steps by kind."""

    parts: dict[str, list[Entry]]
    others: int
    answers: int
    steps: dict[str, int]
    allreduce: dict[str, int] = field(default_factory=dict)
    ran: dict[str, int] = field(default_factory=dict)

    @property
    def kinds(self) -> set[str]:
        """The kinds of steps that ran."""
        return {kind for kind in STEP_KINDS if self.ran.get(f"{kind}/steps")}


def engine_options(job: Mapping[str, Any]) -> dict[str, Any]:
    dtype, _, kv = job["dtype"].partition("+")
    return {
        "tensor_parallel_size": job["tp"], "pipeline_parallel_size": job["pp"], "dtype": dtype, "kv_cache_dtype": kv or "model",
        "device": job["device"], "kv_cache_bytes": 256 << 20, "max_num_tokens": MAX_TOKENS, "max_seq_len": MAX_SEQ,
        "max_batch_size": MAX_BATCH, "skip_tokenizer_init": True, "enable_prefix_caching": False,
    }  # fmt: skip


def truth_of(job: Mapping[str, Any], folder: Path, rows: Sequence[Sequence[int]], spoil: Change | None = None) -> Truth:
    """The reference on a CPU, quantized as the job's engines are. spoil: applied to the yardstick, to test that defects are
    detected."""
    from phalanx.kernels.dtypes import TORCH_DTYPES

    dtype, _, kv = job["dtype"].partition("+")
    on_gpu = job["device"] == "cuda"
    options = {"quantization": ON_LOAD, "fp8_gemm": on_gpu} if dtype == "fp8" else {}
    if kv == "fp8":
        options["kv_cache_dtype"] = "fp8"
    name = compute_dtype(dtype, ModelShape.from_folder(folder), job["device"])
    rounded = torch.bfloat16 if name == "fp32" else TORCH_DTYPES[name]
    logprobs = torch.cat(log_probabilities(folder, rows, tp=job["tp"], dtype=torch.float32, **options))
    near = torch.cat(log_probabilities(folder, rows, tp=job["tp"], dtype=rounded, change=spoil, **options))
    exact = log_probabilities(folder, rows, tp=1, dtype=torch.float32)
    return Truth(logprobs, near, sensitivities(folder, rows, exact))


def observe(llm: LLM, texts: Texts) -> Observed:
    """Send all prompts to an engine, in bursts that make small and large steps."""
    parts: dict[str, list[Entry]] = {"prefill": [], "decode": [], "prompts": []}

    def generate(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Any]:
        result: list[Any] = llm.generate([list(prompt) for prompt in prompts], list(params), use_tqdm=False)
        return result

    def keep(result: Mapping[str, list[Entry]]) -> None:
        for part, entries in result.items():
            parts[part] += entries

    short, long, first = texts.short, texts.long, len(texts.short)
    with ThreadPoolExecutor(4) as askers:  # so that prefill and decode rows share steps
        for result in askers.map(lambda at: forced_prompts.ask_forced(generate, short[at : at + 10], at), range(0, first, 10)):
            keep(result)
    few = len(long) // 2  # some at a time, the rest at once: steps of some hundred tokens, and the largest
    for part in (*(range(at, min(at + 3, few)) for at in range(0, few, 3)), range(few, len(long))):
        keep(forced_prompts.ask_forced(generate, long[part.start : part.stop], first + part.start, prompt_logprobs=True))
    steps: dict[str, int] = {}
    for size, where in _bursts(forced_prompts.prefixes(long, texts.cuts)):
        before = llm.stats()
        keep({"prefill": forced_prompts.ask_prefixes(generate, long, where, first)})
        after = llm.stats()
        # A mean: some step had as many tokens.
        mean = (after.prompt_tokens - before.prompt_tokens) // max(after.steps - before.steps, 1)
        steps[size] = max(steps.get(size, 0), mean)
    others = [_answered_otherwise(generate, texts, size, most) for size, most in BATCHES]
    wrong, result = forced_prompts.continue_greedily(generate, texts.prompts, texts.answers, len(texts.forced))
    keep(result)
    pairs = sum(min(most, len(texts.prompts)) for _, most in BATCHES) + len(texts.prompts)
    return Observed(parts, sum(others) + len(wrong), pairs, steps)


def _bursts(cuts: list[tuple[int, int]]) -> list[tuple[str, list[tuple[int, int]]]]:
    """The prefixes in named groups that are sent at once."""
    groups, at = [], 0
    for size, times in BURSTS:
        for _ in range(times):
            groups.append((f"{size} at once", cuts[at : at + size]))
            at += size
    groups.append(("all at once", cuts[at:]))
    return [(name, group) for name, group in groups if group]


def _answered_otherwise(generate: Generate, texts: Texts, size: int, most: int) -> int:
    """How many of the first `most` prompts get other tokens than their answers, `size` at a time. Greedy without log probabilities,
    so that the fast path's argmax kernel runs."""
    result = 0
    pairs = list(zip(texts.prompts, texts.answers, strict=True))[:most]
    for at in range(0, len(pairs), size):
        prompts, answers = zip(*pairs[at : at + size], strict=True)
        params = [SamplingParams(max_tokens=len(answer), temperature=0, detokenize=False) for answer in answers]
        outputs = generate(prompts, params)
        result += sum(list(output.outputs[0].token_ids) != answer for output, answer in zip(outputs, answers, strict=True))
    return result


def compare(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job: model, dtype (with +fp8: of the cache, too), tp, pp, device; short, long, cuts, answers: numbers of prompts.
    `faults` lists the defects."""
    begin = time.monotonic()
    folder = locate(job["model"])
    texts = Texts.of(job["checkpoint"], **{name: job[name] for name in ("short", "long", "cuts", "answers")})
    options = engine_options(job)
    with ThreadPoolExecutor(3) as pool, ExitStack() as engines:
        worked_out = pool.submit(truth_of, job, folder, texts.rows)
        starting = [pool.submit(partial(LLM, str(folder), **options, **each)) for each in (PLAIN, {})]
        plain, fast = (engines.enter_context(each.result()) for each in starting)
        started = time.monotonic() - begin
        with turn():
            observed = {"plain": observe(plain, texts), "fast": observe(fast, texts)}
        ran = time.monotonic() - begin
        time.sleep(1.2)  # ranks report what they count once a second
        for name, llm in (("plain", plain), ("fast", fast)):
            counted = llm.stats()
            observed[name].allreduce, observed[name].ran = counted.allreduce, counted.ran
        first = fast.facts.ranks[0]
        facts = {"attention": first.attention, "graph_bytes": first.bytes.get("graphs", 0), "table": first.allreduce}
        result = verdict(job, texts, worked_out.result(), observed["plain"], observed["fast"])
    seconds = {"started_s": started, "ran_s": ran, "seconds": time.monotonic() - begin}
    return {**result, "fast": facts, **{name: round(value, 1) for name, value in seconds.items()}}


def verdict(job: Mapping[str, Any], texts: Texts, truth: Truth, plain: Observed, fast: Observed) -> dict[str, Any]:
    """The result of a job, as it is written to JSON."""
    parts, faults = {}, []
    for part in plain.parts:
        both = _common(plain.parts[part], fast.parts[part])
        alone = _alone(plain.parts[part], fast.parts[part])
        if alone and not (plain.others or fast.others):  # another token leads to other positions, and is a fault already
            faults.append(f"{part}: {alone} positions were reported by one of the paths only")
        if both[0]:
            one, other = (forced_prompts.observe(each, texts.rows) for each in both)
            parts[part] = judge(truth, one, other, Limits())
            faults += [f"{part}: {fault}" for fault in parts[part]["faults"]]
    for name, path in (("plain", plain), ("fast", fast)):
        if path.others:
            faults.append(f"the {name} path gave {path.others} of {path.answers} taught answers another token")
    if job["device"] == "cuda":
        faults += _not_run(job, plain, fast)
    return {
        "answers": fast.answers, "answers_with_another_token": {"plain": plain.others, "fast": fast.others},
        "answer_margins": answer_margins(texts, truth), "parts": parts, "steps_tokens_at_least": fast.steps,
        "allreduce": {"plain": plain.allreduce, "fast": fast.allreduce}, "ran": {"plain": plain.ran, "fast": fast.ran},
        "faults": faults,
    }  # fmt: skip


def _not_run(job: Mapping[str, Any], plain: Observed, fast: Observed) -> list[str]:
    """What the fast path should have run and did not, and what the plain path should not have run."""
    largest = max(fast.steps.values(), default=0)
    faults = [] if largest >= LARGE_STEP else [f"no step of the fast path is known to have had {LARGE_STEP} tokens: {fast.steps}"]
    for kind in MUST_RUN if job["tp"] > 1 else ():
        if not any(name.startswith(kind) for name, count in fast.allreduce.items() if count):
            faults.append(f"no all-reduce of the fast path was {kind}: {fast.allreduce}")
    faults += [f"no step of the fast path ran as a {kind}: {fast.ran}" for kind in GRAPHS if kind not in fast.kinds]
    if plain.kinds != {EAGER}:
        faults.append(f"the plain path's steps are to be eager: {plain.ran}")
    return faults


def _common(one: Sequence[Entry], other: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """The entries of positions that both have, in the same order; a position may appear several times."""
    where = {entry[:2] for entry in one} & {entry[:2] for entry in other}
    kept = [sorted((entry for entry in each if entry[:2] in where), key=lambda entry: entry[:2]) for each in (one, other)]
    return kept[0], kept[1]


def _alone(one: Sequence[Entry], other: Sequence[Entry]) -> int:
    """How many entries one of them has more than the other, by position."""
    here, there = (Counter(entry[:2] for entry in each) for each in (one, other))
    return ((here - there) + (there - here)).total()


def answer_margins(texts: Texts, truth: Truth) -> dict[str, float]:
    """Margin in nats between the trained token and the next likely one in the reference, by quantile of the answers' positions."""
    rows, first = texts.rows, len(texts.forced)
    if first == len(rows):
        return {}
    begins = [0, *itertools.accumulate(len(row) for row in rows)]
    where: list[int] = []
    tokens: list[int] = []
    for row, (prompt, answer) in enumerate(zip(texts.prompts, texts.answers, strict=True), start=first):
        where += range(begins[row] + len(prompt) - 1, begins[row + 1] - 1)
        tokens += answer
    logprobs = truth.logprobs[where]
    taught = logprobs.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
    others = logprobs.scatter(-1, torch.tensor(tokens).unsqueeze(-1), -torch.inf).amax(-1)
    margins = taught - others
    shares = (0.0, 0.001, 0.01, 0.1, 0.5)
    return {"positions": len(where), **{f"{share:g}": round(float(margins.quantile(share)), 3) for share in shares}}
