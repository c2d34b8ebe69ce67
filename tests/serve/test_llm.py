# SPDX-License-Identifier: Apache-2.0
"""Offline use on real ranks: a tiny checkpoint over two of them, with chunks, prefix hits and preemption forced."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.config import StructuredOutputParams
from phalanx.deploy.ray_serve import free_ports
from phalanx.engine.executor import FAKE_EXECUTOR
from phalanx.errors import EngineClosed, ModelError, OptionError, RankDied, RequestError, UnknownOption
from phalanx.layout import Layout
from phalanx.serve.client import EngineProcessClient
from phalanx.serve.tokenizer import Tokenizer
from tests.support.checkpoints import write_checkpoint

pytestmark = pytest.mark.usefixtures("forked_python")

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPTS = [
    "What is a rank?", "What is a block? A block holds the keys of sixteen tokens.", "The user asks: 0 1 2 3 4 5 6 7 8 9",
    "你好 🙂", "a", "A phalanx is a formation of ranks. Each rank holds a slice of every layer, and all ranks wait.",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_key_value_heads=2)


@pytest.fixture(scope="module")
def reference(folder):
    """(prompt ids, count) -> greedy ids and the log-probabilities at each position, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(ids, count):
        ids = list(ids)
        with torch.no_grad():
            for _ in range(count):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return ids[len(ids) - count :], scores

    return run


@pytest.fixture(scope="module")
def llm(folder):
    """Two ranks, steps of 24 tokens at most, and a KV cache of 22 blocks: 352 tokens for 8 requests of up to 256."""
    block = 16 * 2 * 2 * 1 * 12 * 4  # tokens, layers, K and V, KV heads on a rank, head_dim, bytes
    with LLM(folder, tensor_parallel_size=2, max_num_tokens=24, max_batch_size=8, kv_cache_bytes=22 * block, seed=5) as loaded:
        yield loaded


def ids_of(llm, text):
    return llm.tokenizer.encode(text)


def test_processes_of_tests_are_forks(llm):
    """Of a template that has imported everything. A variable that `launch` sets, or the launcher, can make each a new interpreter:
    then the tests take twice as long, and all pass."""
    shared = {}
    for process in psutil.Process().children(recursive=True):
        memory = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
        shared[" ".join(process.cmdline()).strip()] = int(re.search(r"Shared_Dirty: +(\d+) kB", memory)[1])
    assert all(shared[title] > 50_000 for title in ("phalanx engine", "phalanx rank 0", "phalanx rank 1")), shared


def test_facts_and_options(llm):
    facts = llm.facts
    assert (facts.layout, facts.max_num_tokens, facts.max_seq_len) == (Layout(tp=2), 24, 256)
    assert facts.num_blocks == 22
    assert [rank.rank for rank in facts.ranks] == [0, 1]
    assert facts.phases
    assert "max_seq_len" in facts.reasons


def test_greedy_equals_transformers_under_pressure(llm, reference):
    """Together: chunked prefill (24 tokens a step), more requests than fit (preemption), and shared beginnings (prefix hits)."""
    stem = ids_of(llm, " ".join(PROMPTS))[:64]
    prompts = [[*stem, 10 + i] for i in range(12)] + [ids_of(llm, text) for text in PROMPTS]
    answers = [reference(prompt, 40)[0] for prompt in prompts]
    # A stop token that does not come: blocks are set aside for a request that only its limit ends, and then none is preempted.
    unsaid = min(set(range(3, llm.facts.vocab_size)).difference(*answers))
    before = llm.stats()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=40, stop_token_ids=[unsaid], **GREEDY), use_tqdm=False)
    after = llm.stats()
    for prompt, output, expected in zip(prompts, outputs, answers, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].text == llm.tokenizer.decode(expected)
    assert after.preemptions > before.preemptions
    assert after.prefix_hits > before.prefix_hits
    assert any(output.num_cached_tokens >= 48 for output in outputs)
    assert (after.running, after.waiting, after.blocks_referenced) == (0, 0, 0)
    assert after.generation_tokens - before.generation_tokens == 40 * len(prompts)


def test_one_prompt_or_many_in_every_form(llm):
    params = SamplingParams(max_tokens=5, **GREEDY)
    ids = ids_of(llm, PROMPTS[0])
    one = llm.generate(PROMPTS[0], params)
    assert (one.prompt, one.prompt_token_ids, one.finished, len(one.outputs)) == (PROMPTS[0], ids, True, 1)
    forms = [PROMPTS[0], ids, {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    many = llm.generate(forms, params, use_tqdm=False)
    assert [output.prompt for output in many] == [PROMPTS[0], None, PROMPTS[0], None]
    assert llm.generate(ids, params).prompt is None
    assert llm.generate({"prompt_token_ids": ids}, params).prompt is None
    assert {tuple(output.outputs[0].token_ids) for output in many} == {tuple(one.outputs[0].token_ids)}
    assert llm.generate([]) == []
    each = llm.generate(
        [ids, ids], [SamplingParams(max_tokens=2, **GREEDY), SamplingParams(max_tokens=3, **GREEDY)], use_tqdm=False
    )
    assert [len(output.outputs[0].token_ids) for output in each] == [2, 3]
    assert len({output.request_id for output in [one, *many, *each]}) == 7


def test_logprobs_equal_transformers(llm, reference):
    prompt = ids_of(llm, PROMPTS[1])
    output = llm.generate(prompt, SamplingParams(max_tokens=6, logprobs=3, prompt_logprobs=2, **GREEDY))
    (completion,) = output.outputs
    _, scores = reference(prompt, 6)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, entry in enumerate([*output.prompt_logprobs[1:], *completion.logprobs]):
        row = scores[position]
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        top = row.topk(len(entry.top))
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert [len(entry.top) for entry in completion.logprobs] == [3] * 6
    assert [entry.token for entry in completion.logprobs] == completion.token_ids
    assert completion.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in completion.logprobs))


def test_seeds_n_and_the_rest_of_the_batch(llm):
    """What "Seeds" of docs/python_api.md says of a CPU: alone and in a batch, which is computed in other steps, the same tokens."""
    assert (llm.facts.device, llm.facts.dtype) == ("cpu", "fp32")
    params = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True)
    alone = llm.generate(PROMPTS[0], params)
    among = llm.generate([*PROMPTS, PROMPTS[0]], params, use_tqdm=False)[-1]
    drawn = [completion.token_ids for completion in alone.outputs]
    assert drawn == [completion.token_ids for completion in among.outputs]
    assert len({tuple(tokens) for tokens in drawn}) == 3
    second = llm.generate(PROMPTS[0], SamplingParams(seed=8, temperature=1.0, max_tokens=12, ignore_eos=True))
    assert second.outputs[0].token_ids == drawn[1]
    free = [llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)) for _ in range(2)]
    assert free[0].outputs[0].token_ids != free[1].outputs[0].token_ids


def test_stop_strings_and_stop_tokens(llm):
    expected = llm.generate(PROMPTS[0], SamplingParams(max_tokens=30, **GREEDY)).outputs[0]
    stop = next(expected.text[i : i + 3] for i in range(8, len(expected.text)) if "�" not in expected.text[i : i + 3])
    completion = llm.generate(PROMPTS[0], SamplingParams(max_tokens=30, stop=stop, **GREEDY)).outputs[0]
    assert (completion.finish_reason, completion.stop_reason, completion.text) == (
        "stop",
        stop,
        expected.text[: expected.text.index(stop)],
    )
    token = expected.token_ids[9]
    at = expected.token_ids.index(token)
    completion = llm.generate(PROMPTS[0], SamplingParams(max_tokens=30, stop_token_ids=[token], **GREEDY)).outputs[0]
    assert (completion.finish_reason, completion.stop_reason, completion.token_ids) == ("stop", token, expected.token_ids[: at + 1])
    assert llm.stats().running == 0


def test_structured_output(llm):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
    wanted = [StructuredOutputParams(json_schema=json.dumps(schema)), StructuredOutputParams(regex="(ab|cd){3}x")]
    params = [SamplingParams(structured_output=each, max_tokens=60, temperature=1.0, seed=1) for each in wanted]
    outputs = llm.generate([PROMPTS[0]] * 2, params, use_tqdm=False)
    assert 0 <= json.loads(outputs[0].outputs[0].text)["n"] <= 99
    assert re.fullmatch("(ab|cd){3}x", outputs[1].outputs[0].text)
    with pytest.raises(OptionError, match="regex"):
        llm.generate(PROMPTS[0], SamplingParams(structured_output=StructuredOutputParams(regex="(")))


def test_generate_async_grows_and_equals_generate(llm):
    params = SamplingParams(max_tokens=20, n=2, **GREEDY)
    expected = llm.generate(PROMPTS[3], params)

    async def collect():
        return [output async for output in llm.generate_async(PROMPTS[3], params)]

    grown = asyncio.run(collect())
    assert [completion.token_ids for completion in grown[-1].outputs] == [completion.token_ids for completion in expected.outputs]
    assert [completion.text for completion in grown[-1].outputs] == [completion.text for completion in expected.outputs]
    assert [output.finished for output in grown] == [False] * (len(grown) - 1) + [True]
    lengths = [len(output.outputs[0].token_ids) for output in grown]
    assert lengths == sorted(lengths)
    for before, after in itertools.pairwise(grown):
        assert after.outputs[0].text.startswith(before.outputs[0].text)


def test_leaving_generate_async_aborts(llm):
    async def leave():
        stream = llm.generate_async(PROMPTS[0], SamplingParams(max_tokens=200, **GREEDY))
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    deadline = time.monotonic() + 10
    while (left := llm.stats()).running + left.waiting + left.blocks_referenced and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (left.running, left.waiting, left.blocks_referenced) == (0, 0, 0)


def test_chat(llm):
    messages = [{"role": "user", "content": "What is a rank?"}]
    params = SamplingParams(max_tokens=8, **GREEDY)
    one = llm.chat(messages, params)
    assert one.prompt == "<|begin|>user: What is a rank?\nassistant: "
    assert one.prompt_token_ids == ids_of(llm, one.prompt)
    many = llm.chat([messages, messages], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in many] == [one.outputs[0].token_ids] * 2
    for wrong, message in (
        (["hello"], "^a message must be a dict"),
        ("hello", "^a chat must be a list of messages"),
        ([], "^a chat must be a list of messages"),
        (messages[0], "^a chat must be a list of messages"),
        (None, "^a chat must be a list of messages"),
        ([messages, []], "^a chat has no message"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.chat(wrong, params)


def test_many_threads_share_the_engine(llm):
    params = SamplingParams(max_tokens=10, **GREEDY)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    outputs = {}

    def run(i):
        outputs[i] = llm.generate(PROMPTS[i], params).outputs[0].token_ids

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [outputs[i] for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([3] * 256, r"256 tokens .*max_seq_len is 256"),
        ([384], r"token 384 .*0\.\.383"),
        ([-1], "token -1"),
        ([], "0 tokens"),
        (3.5, "^a prompt must be a text or a list of token ids, not float"),
        ({"text": "a"}, "give either 'prompt' or 'prompt_token_ids'"),
        (["a", 3], "^a prompt must be a text or a list of token ids, not int"),
        ("\ud800", "not valid Unicode"),
    ],
)
def test_bad_prompts_lose_nothing(llm, prompt, message):
    before = llm.stats().prompt_tokens
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPTS[0], prompt] if not isinstance(prompt, list) or prompt != ["a", 3] else prompt, use_tqdm=False)
    with pytest.raises(RequestError, match=message):
        llm.generate([[5], *prompt] if prompt == ["a", 3] else [prompt], use_tqdm=False)
    assert llm.stats().prompt_tokens == before


@pytest.mark.parametrize("prompts", [None, 5, 2.5, b"bytes", {1: "a", "b": 2}])
def test_what_is_no_prompt_at_all(llm, prompts):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompts)
    with pytest.raises(RequestError, match="prompt"):
        llm.generate_async(prompts)


def test_bad_params(llm):
    with pytest.raises(RequestError, match=r"^2 sampling_params do not match 1 prompts"):
        llm.generate(["a"], [SamplingParams()] * 2)
    with pytest.raises(RequestError, match="SamplingParams, not dict"):
        llm.generate("a", {"n": 1})
    with pytest.raises(RequestError, match="token 9999 in stop_token_ids is unknown"):
        llm.generate("a", SamplingParams(stop_token_ids=[9999]))
    with pytest.raises(OptionError, match="temperature=nan"):
        SamplingParams(temperature=math.nan)


def test_unknown_and_bad_options():
    with pytest.raises(TypeError, match="did you mean 'tensor_parallel_size'"):
        LLM("demo", tensor_paralel_size=2)
    with pytest.raises(UnknownOption, match="'tp_size' is unknown; did you mean 'tensor_parallel_size'"):
        LLM("demo", tp_size=2)
    with pytest.raises(ModelError, match="no folder /none"):
        LLM("/none")
    with pytest.raises(ModelError, match="tokenizer '/nofile' was not found; there is no folder /nofile"):
        LLM("demo", tokenizer="/nofile")


def test_the_engine_refuses_what_it_cannot_do(folder):
    with pytest.raises(OptionError, match=r"max_seq_len=257 .*256"):
        LLM(folder, max_seq_len=257)


@pytest.fixture
def fake_ranks(monkeypatch):
    """LLMs over the real engine process with the fake executor: no model is computed."""
    monkeypatch.setattr(EngineProcessClient, "start", functools.partial(EngineProcessClient.start, executor=FAKE_EXECUTOR))


def test_token_ids_only(folder, fake_ranks):
    with LLM(folder, skip_tokenizer_init=True) as llm:
        output = llm.generate([5, 6], SamplingParams(max_tokens=4, ignore_eos=True))
        assert (output.prompt, output.outputs[0].text, len(output.outputs[0].token_ids)) == (None, "", 4)
        for call in (
            lambda: llm.generate("text"),
            lambda: llm.chat([{"role": "user", "content": "x"}]),
            lambda: llm.generate([5], SamplingParams(stop="x")),
            lambda: llm.generate([5], SamplingParams(structured_output=StructuredOutputParams(regex="a"))),
        ):
            with pytest.raises(RequestError, match="skip_tokenizer_init is set"):
                call()


@pytest.fixture
def stating(tmp_path, folder):
    """A checkpoint whose generation_config.json has defaults of requests."""
    copy = shutil.copytree(folder, tmp_path / "stating")
    config = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**config, "top_k": 1, "temperature": 0.7, "max_new_tokens": 5}))
    return copy


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_checkpoint_has_defaults_of_requests(stating, fake_ranks, caplog, replicas):
    caplog.set_level("INFO", logger="phalanx")
    with LLM(stating, replicas=replicas, skip_tokenizer_init=True, device="cpu") as llm:
        assert llm.default_sampling_params == SamplingParams(top_k=1, temperature=0.7, max_tokens=5)
        assert len(llm.generate([5, 6]).outputs[0].token_ids) == 5
        assert len(llm.generate([5, 6], SamplingParams(max_tokens=7, ignore_eos=True)).outputs[0].token_ids) == 7
    assert "(generation_config.json): temperature 0.7, top_k 1, max_tokens 5;" in caplog.text


def test_the_checkpoints_defaults_are_ignored_on_demand(stating, fake_ranks):
    with LLM(stating, generation_config="none", skip_tokenizer_init=True) as llm:
        assert llm.default_sampling_params == SamplingParams()


def test_the_checkpoints_top_k_of_1_is_greedy(stating, reference):
    with LLM(stating, device="cpu") as llm:
        output = llm.generate(PROMPTS[0])
        expected, _ = reference(output.prompt_token_ids, 5)
        assert output.outputs[0].token_ids == expected[-5:]


def test_an_eos_token_that_the_model_lacks_is_dropped(tmp_path, folder, fake_ranks, caplog):
    """No request can end by it, and none is rejected for it."""
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "generation_config.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    last = Tokenizer.load(copy).vocab_size - 1
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": last, "eos_token_id": None}))
    tokenizer_config = json.loads((copy / "tokenizer_config.json").read_text())
    text = Tokenizer.load(copy).backend.id_to_token(last)
    (copy / "tokenizer_config.json").write_text(json.dumps({**tokenizer_config, "eos_token": text}))
    with LLM(copy) as llm:
        assert llm.tokenizer.eos_token_id == last
        assert len(llm.generate([5, 6], SamplingParams(max_tokens=4)).outputs[0].token_ids) == 4
    assert caplog.messages.count(f"eos ids [{last}] of the tokenizer are dropped: the model has tokens 0..{last - 1}") == 1


def test_after_shutdown(folder, fake_ranks):
    llm = LLM(folder)
    engine = llm._engine.client._child.process
    waiting = []

    def wait():
        try:
            llm.generate([[5]] * 64, SamplingParams(max_tokens=250, ignore_eos=True), use_tqdm=False)
        except EngineClosed as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    llm.shutdown()
    thread.join(20)
    assert not thread.is_alive()
    assert engine.poll() is not None
    llm.shutdown()
    for call in (lambda: llm.generate("x"), llm.stats):
        with pytest.raises(EngineClosed):
            call()


FORKED = """
import os, sys
from phalanx import LLM, PhalanxError, SamplingParams
llm = LLM({folder!r}, kv_cache_bytes=1 << 26)
pid = os.fork()
if pid == 0:
    try:
        llm.generate([5])
    except PhalanxError as error:
        sys.exit(7 if "belongs to process" in str(error) else 8)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(status, len(llm.generate([5], SamplingParams(max_tokens=2, min_tokens=2)).outputs[0].token_ids))
"""


def test_a_forked_copy_neither_uses_nor_ends_the_engine(tmp_path, folder):
    process = script(tmp_path, FORKED.format(folder=str(folder)))
    assert process.communicate(timeout=120)[0] == "7 2\n"
    assert process.returncode == 0


def test_an_llm_that_is_forgotten_is_shut_down(folder, fake_ranks):
    llm = LLM(folder)
    engine = llm._engine.client._child.process
    llm.generate([5], SamplingParams(max_tokens=2))
    del llm
    gc.collect()
    assert engine.wait(20) == 0


def test_an_llm_that_its_own_thread_collects_leaves_nothing_open(folder, fake_ranks):
    """The garbage collector may run on the thread of the engine's loop, which cannot wait for that loop. An unclosed socket or loop
    is a ResourceWarning, and an error in these tests."""
    llm = LLM(folder)
    background = llm._engine
    client, loop, thread = background.client, background._loop, background._thread
    finalizer = llm._finalizer
    loop.call_soon_threadsafe(finalizer)
    thread.join(30)
    assert not thread.is_alive()
    assert loop.is_closed()
    assert client._socket.closed
    assert client._child.process.wait(20) == -signal.SIGKILL
    with pytest.raises(EngineClosed):
        llm.generate([5])


# ---- whole scripts -------------------------------------------------------------------------------------------------------


def descendants(pid):
    return psutil.Process(pid).children(recursive=True)


def gone(processes, seconds):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text, encoding="utf-8")
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)


THREE_LINES = """
from phalanx import LLM, SamplingParams
llm = LLM({folder!r}, tensor_parallel_size=2)
print(llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)).outputs[0].token_ids)
"""


@pytest.mark.parametrize("way", ["file", "input", "without stderr"])
def test_three_lines_without_a_guard(tmp_path, folder, reference, way):
    text = THREE_LINES.format(folder=str(folder))
    if way == "file":
        process = script(tmp_path, text)
    else:
        shell = ["sh", "-c", f"exec '{sys.executable}' - {'2>&-' if way == 'without stderr' else ''}"]
        process = subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(None if way == "file" else text, timeout=120)
    assert process.returncode == 0
    assert json.loads(out) == reference([5, 6, 7], 4)[0]


INTERRUPTED = """
from phalanx import LLM, SamplingParams
llm = LLM({folder!r}, tensor_parallel_size=2, max_batch_size=2, kv_cache_bytes=1 << 26)
long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
try:
    print("running", flush=True)
    llm.generate([[5]] * 500, long, use_tqdm=False)
except KeyboardInterrupt:
    stats = llm.stats()
    print("interrupted", stats.running + stats.waiting, flush=True)
print(len(llm.generate([5], long).outputs[0].token_ids), flush=True)
print("again", flush=True)
llm.generate([[5]] * 500, long, use_tqdm=False)
"""


def test_ctrl_c_leaves_the_llm_usable_and_sigkill_leaves_nothing(tmp_path, folder):
    process = script(tmp_path, INTERRUPTED.format(folder=str(folder)))
    try:
        assert process.stdout.readline() == "running\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("interrupted ")
        assert process.stdout.readline() == "100\n"
        assert process.stdout.readline() == "again\n"
        family = descendants(process.pid)
        assert len(family) >= 3  # the engine and two ranks
        process.kill()
        assert gone(family, 10)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.usefixtures("new_interpreters")
def test_ctrl_c_while_starting_leaves_nothing(tmp_path, folder):
    process = script(tmp_path, THREE_LINES.format(folder=str(folder)))
    try:
        deadline = time.monotonic() + 60
        while not (family := descendants(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(1.0)
        family = {*family, *descendants(process.pid)}
        process.send_signal(signal.SIGINT)
        process.wait(15)
        assert process.returncode not in (0, None)
        assert gone(family, 10)
    finally:
        process.kill()
        process.communicate()


def test_a_killed_rank_is_named(folder):
    llm = LLM(folder, tensor_parallel_size=2, kv_cache_bytes=1 << 26)
    family = descendants(os.getpid())
    engine = psutil.Process(llm._engine.client._child.pid)
    ranks = {child.pid for child in engine.children(recursive=True)}
    family = [process for process in family if process.pid in ranks | {engine.pid}]
    named = {" ".join(process.cmdline()): process for process in family}
    victim = next(process for title, process in named.items() if "rank 1" in title)
    killer = threading.Timer(0.5, victim.kill)
    killer.start()
    begin = time.monotonic()
    with pytest.raises(RankDied, match=r"rank 1\b.*SIGKILL"):
        llm.generate([[5]] * 500, SamplingParams(max_tokens=240, ignore_eos=True), use_tqdm=False)
    assert time.monotonic() - begin < 11
    assert gone(family, 10)
    with pytest.raises(RankDied, match=r"rank 1\b"):
        llm.generate([5])
    llm.shutdown()


def test_torchrun(tmp_path, folder, reference):
    """Each of its processes runs the same script; rank 0 has the LLM, the other serves and then leaves."""
    path = tmp_path / "script.py"
    token = "cluster_token='a token of sixteen bytes or more', tensor_parallel_size"
    text = THREE_LINES.format(folder=str(folder)).replace("tensor_parallel_size", token)
    path.write_text(text, encoding="utf-8")
    port = free_ports(2)  # torchrun's, and the engine's
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == reference([5, 6, 7], 4)[0]
