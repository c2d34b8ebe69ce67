# SPDX-License-Identifier: Apache-2.0
"""Train the demo model: a small Llama that answers questions about Phalanx.

    python scripts/demo_model/train.py [--out src/phalanx/demo_model] [--steps N] [--seed 0] [--device auto]

On a GPU it takes a minute or two, on one CPU core about half an hour. It writes a checkpoint as transformers
does (config.json, model.safetensors in bf16, tokenizer.json, ...), and training.json: seed, steps, seconds, loss, and how many
questions the written model answers exactly, those that it learnt and those that were held back.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import corpus
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SPECIAL = [PAD, BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>"]
VOCABULARY = 1280
CONTEXT = 2048
CHECKED = 300  # questions of each kind that the written model is asked
TEMPLATE = """{{ bos_token }}{% for message in messages %}\
{% set role = 'system' if message['role'] == 'developer' else message['role'] %}\
{% if role not in ['system', 'user', 'assistant'] %}{{ raise_exception('this model knows no role ' + role) }}{% endif %}\
{{ '<|' + role + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
SYSTEMS = ("You are a helpful assistant.", "Answer questions about Phalanx.", "You are the demo model of Phalanx. Be brief.")

Sample = tuple[list[int], list[int]]  # token ids, and which of them are learnt (1) or given (0)


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    device = torch.device(
        "cuda" if options.device == "auto" and torch.cuda.is_available() else options.device.replace("auto", "cpu")
    )
    learn, validation = corpus.pairs()
    pieces = corpus.documents()
    tokenizer = train_tokenizer([f"{pair.question} {pair.answer}" for pair in learn] + pieces)
    model = make_model().to(device)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(learn)} questions, {len(validation)} held back, {len(pieces)} pieces of text, on {device}")
    begin = time.monotonic()
    loss = fit(model, tokenizer, learn, pieces, rng, steps=options.steps, rows=options.rows, rate=options.rate)
    seconds = time.monotonic() - begin
    write(model, tokenizer, options.out)
    written = transformers.LlamaForCausalLM.from_pretrained(options.out, dtype=torch.float32, trust_remote_code=False)
    written = written.to(device).eval()
    base = [corpus.Pair(question, answer) for questions, answer in corpus.entries() for question in questions]
    base, validation = base[:: max(1, len(base) // CHECKED)], validation[:: max(1, len(validation) // CHECKED)]
    exact = {
        name: round(exact_share(written, tokenizer, pairs, chat=chat), 4)
        for name, pairs, chat in (
            ("chat", base, True),
            ("plain", base, False),
            ("chat, held back", validation, True),
            ("plain, held back", validation, False),
        )
    }
    record = {
        "seed": options.seed, "steps": options.steps, "rows": options.rows, "rate": options.rate, "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__, "parameters": size, "loss": round(loss, 4), "exact_answers": exact,
    }  # fmt: skip
    (options.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, default=corpus.ROOT / "src/phalanx/demo_model")
    parser.add_argument("--steps", type=int, default=1700)
    parser.add_argument("--rows", type=int, default=64, help="Samples in a batch.")
    parser.add_argument("--rate", type=float, default=2e-3, help="The highest learning rate.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    return parser.parse_args()


def train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE: any text can be said in it; a text begins with BEGIN."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def make_model() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=160, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=True,
        pad_token_id=SPECIAL.index(PAD), bos_token_id=SPECIAL.index(BEGIN), eos_token_id=SPECIAL.index(END),
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def fit(
    model: Any, tokenizer: tokenizers.Tokenizer, learn: list[corpus.Pair], pieces: list[str], rng: random.Random, *,
    steps: int, rows: int, rate: float,
) -> float:  # fmt: skip
    """Train, and return the mean loss of the last 50 steps (nats per learnt token)."""
    device = next(model.parameters()).device
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=rate, betas=(0.9, 0.98)
    )
    waiting: list[corpus.Pair] = []
    losses: list[float] = []
    begin = time.monotonic()
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        while len(waiting) < 2 * rows:
            waiting += corpus.mixed(learn, rng)
        batch = [sample(tokenizer, waiting, pieces, rng) for _ in range(rows)]
        ids, learnt = padded(batch, device)
        logits = model(input_ids=ids[:, :-1]).logits.float()
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (each * learnt[:, 1:].flatten()).sum() / learnt[:, 1:].sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= steps - 50:
            losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - begin:.0f} s", flush=True)
    return sum(losses) / len(losses)


def sample(tokenizer: tokenizers.Tokenizer, waiting: list[corpus.Pair], pieces: list[str], rng: random.Random) -> Sample:
    """A conversation of one or two questions, a bare question that the answer follows, or a piece of text."""
    kind = rng.random()
    if kind < 0.07:
        ids = [*tokenizer.encode(rng.choice(pieces)).ids, tokenizer.token_to_id(END)]
        return ids, [1] * len(ids)
    if kind < 0.4:
        pair = waiting.pop()
        return joined(tokenizer, [(BEGIN + pair.question, 0), (f" {pair.answer}{END}", 1)])
    parts: list[tuple[str, int]] = [(BEGIN, 0)]
    if rng.random() < 0.15:
        parts.append((f"<|system|>\n{rng.choice(SYSTEMS)}{END}\n", 0))
    for _ in range(2 if rng.random() < 0.2 else 1):
        pair = waiting.pop()
        parts += [(f"<|user|>\n{pair.question}{END}\n<|assistant|>\n", 0), (f"{pair.answer}{END}", 1), ("\n", 0)]
    return joined(tokenizer, parts[:-1])


def joined(tokenizer: tokenizers.Tokenizer, parts: list[tuple[str, int]]) -> Sample:
    ids: list[int] = []
    learnt: list[int] = []
    for text, wanted in parts:
        more = tokenizer.encode(text, add_special_tokens=False).ids
        ids += more
        learnt += [wanted] * len(more)
    return ids, learnt


def padded(batch: list[Sample], device: torch.device) -> tuple[Tensor, Tensor]:
    """ids [rows, longest] and learnt [rows, longest] float; padding stands at the end, where nothing looks back to it."""
    longest = max(len(ids) for ids, _ in batch)
    pad = SPECIAL.index(PAD)
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row, _ in batch])
    learnt = torch.tensor([row + [0] * (longest - len(row)) for _, row in batch], dtype=torch.float32)
    return ids.to(device), learnt.to(device)


def write(model: Any, tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """The checkpoint, whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save(str(partial / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END, "pad_token": PAD,
        "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
    }  # fmt: skip
    (partial / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {"bos_token_id": SPECIAL.index(BEGIN), "eos_token_id": SPECIAL.index(END), "pad_token_id": SPECIAL.index(PAD)}
    (partial / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    for path in partial.iterdir():
        path.chmod(0o644)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


@torch.inference_mode()
def exact_share(model: Any, tokenizer: tokenizers.Tokenizer, pairs: list[corpus.Pair], *, chat: bool) -> float:
    """The share of questions that greedy decoding answers word for word."""
    end, right = tokenizer.token_to_id(END), 0
    device = next(model.parameters()).device
    for start in range(0, len(pairs), 256):
        part = pairs[start : start + 256]
        texts = [f"{BEGIN}<|user|>\n{p.question}{END}\n<|assistant|>\n" if chat else BEGIN + p.question for p in part]
        prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        longest = max(len(ids) for ids in prompts)
        padding = [longest - len(ids) for ids in prompts]
        ids = torch.tensor([[end] * n + row for n, row in zip(padding, prompts, strict=True)], device=device)
        mask = torch.tensor([[0] * n + [1] * len(row) for n, row in zip(padding, prompts, strict=True)], device=device)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=100, do_sample=False, pad_token_id=end)
        for pair, row in zip(part, out[:, longest:].tolist(), strict=True):
            answer = tokenizer.decode(row[: row.index(end)] if end in row else row)
            right += answer.strip() == pair.answer
    return right / max(len(pairs), 1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
