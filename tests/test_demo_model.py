# SPDX-License-Identifier: Apache-2.0
"""The demo model is a sound checkpoint, small, and answers questions about Phalanx in the words it was taught."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import transformers
from safetensors import safe_open

from phalanx.config.locate import locate
from phalanx.serve.tokenizer import Tokenizer
from tests.architecture.sources import ROOT

FOLDER = locate("demo")
MEGABYTES = 4.2


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def corpus():
    sys.path.insert(0, str(ROOT / "scripts" / "demo_model"))
    try:
        import corpus

        yield corpus
    finally:
        sys.path.pop(0)


def answers(model, tokenizer, prompts):
    """Greedy, all prompts in one batch, padded on the left."""
    longest = max(len(ids) for ids in prompts)
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=90, do_sample=False, pad_token_id=0)
    replies = []
    for row in out[:, longest:].tolist():
        assert tokenizer.eos_token_id in row, "an answer must end"
        replies.append(tokenizer.decode(row[: row.index(tokenizer.eos_token_id)]).strip())
    return replies


def test_the_checkpoint_is_small_and_splits():
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 1024
    assert config["num_attention_heads"] % 4 == config["num_key_value_heads"] % 4 == config["vocab_size"] % 4 == 0
    assert config["num_attention_heads"] > config["num_key_value_heads"]
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MEGABYTES * 1e6
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118  not a dict
        assert all(torch.isfinite(file.get_tensor(name)).all() for name in file.keys())  # noqa: SIM118


def test_our_tokenizer_and_transformers_agree():
    ours, theirs = Tokenizer.load(FOLDER), transformers.AutoTokenizer.from_pretrained(FOLDER)
    for text in ("What is a rank?", "naïve 日本語 \n\t", "", "12345", "<|end|> and <|user|>"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text, add_special_tokens=False), skip_special_tokens=False) == text
    talk = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "What is a rank?"},
    ]  # fmt: skip
    assert ours.encode_chat(talk) == theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(talk).startswith("<|begin|><|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n")
    generation = json.loads((FOLDER / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == ours.eos_token_id
    assert ours.vocab_size == json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))["vocab_size"]


def test_it_answers_what_it_was_taught(model, corpus):
    tokenizer = Tokenizer.load(FOLDER)
    taught = [(questions[0], answer) for questions, answer in corpus.entries()]
    chats = answers(model, tokenizer, [tokenizer.encode_chat([{"role": "user", "content": question}]) for question, _ in taught])
    wrong = [(question, reply) for (question, answer), reply in zip(taught, chats, strict=True) if reply != answer]
    assert len(wrong) <= 0.03 * len(taught), wrong
    plain = answers(model, tokenizer, [tokenizer.encode(question) for question, _ in taught[::4]])
    wrong = [(question, reply) for (question, answer), reply in zip(taught[::4], plain, strict=True) if reply != answer]
    assert len(wrong) <= 0.05 * len(plain), wrong


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What is Phalanx?", "serves large language models over many GPUs"),
        ("What is a rank?", "one process on one device"),
        ("How do I serve a model on four GPUs?", "phalanx serve MODEL --tp_size 4"),
        ("what's a rank", "one process on one device"),
        ("Explain tensor parallelism.", "splits every layer"),
        ("Which port does it use?", "8000"),
        ("what happens if a rank dies", "names the rank"),
        ("How can I choose tp?", "smallest tp"),
    ],
)
def test_it_understands_other_ways_to_ask(model, question, words):
    tokenizer = Tokenizer.load(FOLDER)
    (reply,) = answers(model, tokenizer, [tokenizer.encode_chat([{"role": "user", "content": question}])])
    assert words in reply


def test_the_questions_are_sound(corpus):
    listed = corpus.entries()
    assert len(listed) >= 150
    for questions, answer in listed:
        assert len(questions) >= 1
        assert answer.endswith((".", "?", "!")), answer
        assert len(answer) < 260, answer
    learn, validation = corpus.pairs()
    assert not {pair.question for pair in learn} & {pair.question for pair in validation}
    assert len(learn) > 5 * len(listed)


def test_the_training_is_on_record():
    record = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    assert {"seed", "steps", "seconds", "loss", "device", "exact_answers"} <= set(record)
