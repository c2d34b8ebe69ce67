# SPDX-License-Identifier: Apache-2.0
"""Train an EAGLE-3 head (arXiv 2503.01840) for a model, on text that the model writes itself: on one GPU, or on a CPU.

    python scripts/train_eagle3.py MODEL HEAD --prompts prompts.txt
    phalanx serve MODEL --speculative_config '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 4}'

1. The model answers the prompts: one in a line of FILE, or 720 built-in ones. A model without a chat template continues them.
2. The tokens that occur most become the draft vocabulary. One forward over each text keeps three inner states and the most likely
   tokens of each position.
3. The head is trained as it drafts: its first pass reads the model's inner states, the next ones its own, and each pass predicts a
   token further ahead (training-time test). The loss is the cross-entropy to the model's probabilities.
4. HEAD has config.json and model.safetensors with SpecForge's names. The texts of every 21st prompt are held out. After each epoch
   the share of accepted drafts is printed, by place, given that those before are accepted: that of the engine on these texts.

Texts and states are kept in HEAD.work, and used again by the next run: states take 2 bytes for each token and value, 25 GB for a
million tokens of a model of 8B. Remove the folder when the head is good.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from phalanx import LLM, SamplingParams
from phalanx.comm.group import Solo
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape, load_config
from phalanx.errors import PhalanxError
from phalanx.layout.cache import request_bytes
from phalanx.layout.eagle3 import LAYERS, Eagle3
from phalanx.layout.families import model_cache
from phalanx.models import registry, weights
from phalanx.models.batch import Batch, InnerStates
from phalanx.models.cache import empty_caches
from phalanx.models.decoder import Decoder
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.layers.rope import Rotary
from phalanx.models.slices import LayerContext

BLOCK = 16  # tokens of a KV block of the forward over texts
TOP = 32  # tokens of the draft vocabulary whose probabilities are kept for each position
DECAY = 0.8  # of the loss, from one place to the next
PART = 96  # prompts that are answered before their texts are written

TASKS = (
    "Explain {} to a child.", "Write a short story about {}.", "List five facts about {}, each with a reason.",
    "What are the advantages and the disadvantages of {}?", "Write a letter to a friend about {}.",
    "Give a step by step guide to {}.", "Summarize the history of {} in one paragraph.",
    "Write a dialogue between two people who disagree about {}.", "What questions would you ask an expert in {}?",
    "Write a poem about {}.", "Compare {} today with {} a hundred years ago.",
    "Describe common mistakes with {} and how to avoid them.", "Write a news article about {}.", "What is the future of {}?",
    "Write a plan for a lesson on {}.",
)  # fmt: skip
SUBJECTS = (
    "the water cycle", "bicycles", "bread", "volcanoes", "the stock market", "chess", "electric cars", "honey bees", "the moon",
    "gardening", "programming in Python", "sorting algorithms", "the human heart", "railways", "coffee", "photography",
    "earthquakes", "public libraries", "vaccines", "solar energy", "the ocean", "mountain climbing", "jazz", "the Roman Empire",
    "cooking rice", "airplanes", "time zones", "recycling", "dinosaurs", "the internet", "football", "painting", "sleep",
    "fractions", "democracy", "cheese", "robots", "winter", "learning a language", "lighthouses", "databases", "probability",
    "whales", "bridges", "saving money", "the desert", "email", "tea",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    work = options.work or options.head.with_name(options.head.name + ".work")
    try:
        folder = locate(options.model)
        if options.head.resolve() == folder.resolve():
            raise PhalanxError(f"HEAD is the model's folder, {options.head}", why="it would be overwritten", next="name another")
        shape = ModelShape.from_folder(folder)
        declared = declare(options, folder, shape, work / "head")
        texts = write_texts(options, folder, work / "texts.jsonl")
        train(options, folder, shape, declared, texts, work)
    except PhalanxError as error:
        print(f"train_eagle3: {error}", file=sys.stderr)
        return 1
    print(f"written: {options.head}")
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help='a folder, a Hub id or "demo"')
    parser.add_argument("head", type=Path, help="the folder that is written")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt in a line")
    parser.add_argument("--max_tokens", type=positive, default=256, help="of each answer")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="of the prompts, in turn")
    parser.add_argument("--engine", type=fields, default={}, metavar="JSON", help="options of the engine that answers prompts")
    parser.add_argument("--draft_vocab_size", type=positive, default=32000)
    parser.add_argument(
        "--layers", type=int, nargs="+", help="before which the head reads; default: 2, the middle, the last but two"
    )
    parser.add_argument(
        "--config", type=fields, default={}, metavar="JSON", help="fields of config.json, such as intermediate_size"
    )
    parser.add_argument("--unroll", type=positive, default=5, help="passes of the head that are trained")
    parser.add_argument("--epochs", type=int, default=2, help="0 writes an untrained head")
    parser.add_argument("--batch_tokens", type=positive, default=4096)
    parser.add_argument("--lr", type=rate, default=5e-4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=positive, help="of a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="the folder of texts and states; default: HEAD.work")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def rate(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return number


def fields(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object")
    return value


# ---- the head's config.json ------------------------------------------------------------------------------------------


def declare(options: argparse.Namespace, folder: Path, shape: ModelShape, written: Path) -> Eagle3:
    """Write config.json, not yet into HEAD, which may have weights of other layers, and read it as the engine does. Raises
    ModelError for a head that it would not read."""
    if request_bytes(model_cache(shape)):
        raise PhalanxError(
            f"{shape.architecture} keeps a state of each request", why="the forward over texts has no place for it",
            next="train a head for a model without recurrent layers",
        )  # fmt: skip
    raw = load_config(folder)
    raw = raw.get("text_config", raw)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "num_hidden_layers": 1, "hidden_act": "silu",
        "vocab_size": shape.vocab_size, "draft_vocab_size": min(options.draft_vocab_size, shape.vocab_size),
        "max_position_embeddings": shape.max_positions, "rms_norm_eps": shape.rms_norm_eps, "tie_word_embeddings": False,
        "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[shape.dtype],
        **{name: raw[name] for name in ("rope_theta", "rope_scaling", "rope_parameters") if name in raw},
        **({} if options.layers is None else {LAYERS: stated_layers(options.layers)}), **options.config,
    }  # fmt: skip
    written.mkdir(parents=True, exist_ok=True)
    (written / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return Eagle3.from_folder(written, shape).with_embedding(False)


def stated_layers(layers: Sequence[int]) -> list[int]:
    """Layers before which the head reads, as a config states them: see `phalanx.layout.eagle3`."""
    if min(layers) == 1:
        raise PhalanxError(
            "--layers begins with 1", why="readers take ids that begin with 1 as layers whose output is read",
            next="begin with another layer",
        )  # fmt: skip
    return [layer - 1 for layer in layers] if min(layers) == 2 else list(layers)


# ---- texts -----------------------------------------------------------------------------------------------------------


@dataclass
class Text:
    """A prompt and its answer, `tokens`, of which the first `prompt` are the prompt's. begin: of its states among those of all."""

    tokens: list[int]
    prompt: int
    temperature: float
    held_out: bool
    begin: int = 0


def changed(folder: Path) -> dict[str, int]:
    """When the weights of the model were written, in ns: texts of earlier weights are another model's."""
    return {file.name: file.stat().st_mtime_ns for file in sorted(folder.glob("*.safetensors"))}


def write_texts(options: argparse.Namespace, folder: Path, file: Path) -> list[Text]:
    """The answers of the model, those in the file among them; the others are added to it."""
    prompts = [task.replace("{}", subject) for subject in SUBJECTS for task in TASKS]
    if options.prompts is not None:
        try:
            prompts = [line.strip() for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise PhalanxError(f"--prompts {options.prompts} cannot be read", why=str(error), next="name a text file") from error
    if len(prompts) < 21:
        raise PhalanxError(f"{len(prompts)} prompts are not enough", why="every 21st one is held out", next="give more prompts")
    file.parent.mkdir(parents=True, exist_ok=True)
    stated = {
        "model": options.model, "weights": changed(folder), "max_tokens": options.max_tokens, "temperatures": options.temperatures,
        "prompts": prompts,
    }  # fmt: skip
    about = file.with_name("about.json")
    if not about.exists():
        about.write_text(json.dumps(stated), encoding="utf-8")
    elif json.loads(about.read_text(encoding="utf-8")) != stated:
        raise PhalanxError(
            f"{file.parent} has texts of another model or of earlier weights, or of other prompts, temperatures or max_tokens",
            why="they would be mixed", next="name another --work, or remove this one",
        )  # fmt: skip
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    if len(lines) < len(prompts):
        with LLM(options.model, **options.engine) as llm, file.open("a", encoding="utf-8") as out:
            for text in answers(llm, prompts, len(lines), options):
                lines.append(json.dumps(text))
                out.write(lines[-1] + "\n")
                out.flush()
    texts = []
    for number, line in enumerate(lines):
        read = json.loads(line)
        texts.append(Text(read["prompt"] + read["output"], len(read["prompt"]), read["temperature"], number % 21 == 10))
    texts = [text for text in texts if len(text.tokens) > text.prompt + options.unroll]
    if {text.held_out for text in texts} != {False, True}:
        raise PhalanxError(
            f"{len(texts)} answers have more than {options.unroll} tokens (--unroll)",
            why="some are trained on, and others held out", next="raise --max_tokens, or give other prompts",
        )  # fmt: skip
    return texts


def answers(llm: LLM, prompts: Sequence[str], begin: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of the prompts from `begin` on. The seed is the number of the prompt."""
    start, written, temperatures = time.monotonic(), 0, options.temperatures
    chats = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    for first in range(begin, len(prompts), PART):
        numbers = range(first, min(first + PART, len(prompts)))
        params = [
            SamplingParams(temperature=temperatures[number % len(temperatures)], max_tokens=options.max_tokens, seed=number)
            for number in numbers
        ]
        if chats:
            outputs = llm.chat([[{"role": "user", "content": prompts[number]}] for number in numbers], params, use_tqdm=False)
        else:
            outputs = llm.generate([prompts[number] for number in numbers], params, use_tqdm=False)
        for output, param in zip(outputs, params, strict=True):
            tokens = list(output.outputs[0].token_ids)
            written += len(tokens)
            yield {"prompt": list(output.prompt_token_ids), "output": tokens, "temperature": param.temperature}
        print(
            f"texts: {numbers.stop} of {len(prompts)}, {written} tokens, {written / (time.monotonic() - start):.0f} a second",
            flush=True,
        )


# ---- what the model computes of them ---------------------------------------------------------------------------------


@dataclass
class States:
    """Of all texts, one after the other. inner [N, L * hidden] bf16, in a file: the inner states. tokens [N, K] int32: the most
    likely of the draft vocabulary, as its ids; shares [N, K]: their probabilities among all tokens."""

    inner: Tensor
    tokens: Tensor
    shares: Tensor


def draft_ids(texts: Sequence[Text], size: int, vocabulary: int) -> Tensor:
    """[size] int64, ascending: the tokens that occur most in answers, then those with the lowest ids."""
    counts = Counter(token for text in texts if not text.held_out for token in text.tokens[text.prompt :])
    ids = [token for token, _ in counts.most_common(size)]
    known = set(ids)
    ids += [token for token in range(vocabulary) if token not in known][: size - len(ids)]
    return torch.tensor(ids).sort().values


def states_of(model: Decoder, texts: Sequence[Text], layers: tuple[int, ...], ids: Tensor, work: Path, most: int) -> States:
    """Those of an earlier run, if it had these texts, layers and draft vocabulary; else they are computed and kept. Gives each text
    its `begin`."""
    begin = 0
    for text in sorted(texts, key=_length):
        text.begin, begin = begin, begin + len(text.tokens)
    file, rest, width = work / "states.bin", work / "states.safetensors", len(layers) * model.shape.hidden_size
    kept, made_of = (load_file(rest) if rest.exists() else {}), torch.cat([torch.tensor(layers), ids])
    same = bool(kept) and torch.equal(kept["made_of"], made_of) and len(kept["tokens"]) == begin
    if not same:
        rest.unlink(missing_ok=True)
        file.unlink(missing_ok=True)
    inner = torch.from_file(str(file), shared=True, size=begin * width, dtype=torch.bfloat16).view(begin, width)
    if same:
        print(f"states: those of the run before, of {begin} tokens", flush=True)
        return States(inner, kept["tokens"], kept["shares"])
    states = compute_states(model, texts, layers, ids, inner, most)
    save_file({"made_of": made_of, "tokens": states.tokens, "shares": states.shares}, rest)
    return states


@torch.inference_mode()
def compute_states(model: Decoder, texts: Sequence[Text], layers: tuple[int, ...], ids: Tensor, inner: Tensor, most: int) -> States:
    """One forward over each text, of up to `most` tokens at once. inner: is filled."""
    total, kept = len(inner), min(TOP, len(ids))
    tokens, shares = torch.empty(total, kept, dtype=torch.int32), torch.empty(total, kept)
    ids, begin, reported = ids.to(model.context.device), 0, time.monotonic()
    assert model.lm_head is not None
    for group in groups(texts, most):
        batch = prefill(model, group)
        out = torch.empty(len(batch.token_ids), inner.shape[1], dtype=model.context.dtype, device=model.context.device)
        batch.inner = InnerStates(layers, out)
        caches = empty_caches(model.declared_caches(), len(batch.token_ids) // BLOCK + len(group), BLOCK, model.context.device)
        hidden = model.hidden_states(batch, caches)
        inner[begin : begin + len(out)] = out.to(torch.bfloat16).cpu()
        for part in range(0, len(out), 512):
            logits = model.lm_head.gather(model.lm_head.local(hidden[part : part + 512])).float()
            probabilities, at = logits.softmax(-1)[:, ids].topk(kept, -1)
            here = slice(begin + part, begin + part + len(at))
            tokens[here], shares[here] = at.cpu().int(), probabilities.cpu()
        begin += len(out)
        if time.monotonic() - reported > 20:
            reported = time.monotonic()
            print(f"states: {begin} of {total} tokens", flush=True)
    return States(inner, tokens, shares)


def _length(text: Text) -> int:
    """By which texts are in order, the longest first."""
    return -len(text.tokens)


def groups(texts: Sequence[Text], most: int) -> Iterator[list[Text]]:
    """Texts of similar lengths, of up to `most` tokens with padding, at least one."""
    group: list[Text] = []
    for text in sorted(texts, key=_length):
        if group and (len(group) + 1) * len(group[0].tokens) > most:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def prefill(model: Decoder, texts: Sequence[Text]) -> Batch:
    """All tokens of some texts in one forward. Each layer has a cache of its own: all groups of layers have the same blocks."""
    device, shape = model.context.device, model.shape
    lengths = [len(text.tokens) for text in texts]
    needed = [-(-length // BLOCK) for length in lengths]
    firsts, starts = np.cumsum([0, *needed]).tolist(), np.cumsum([0, *lengths]).tolist()
    tables = np.array([[first + min(block, count - 1) for block in range(max(needed))]
                       for first, count in zip(firsts, needed, strict=False)], dtype=np.int32)  # fmt: skip

    def sent(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    kv_slots = sent([first * BLOCK + at for first, length in zip(firsts, lengths, strict=False) for at in range(length)])
    batch = Batch(
        token_ids=sent([token for text in texts for token in text.tokens]), kv_slots=kv_slots,
        positions=sent([at for length in lengths for at in range(length)]), query_starts=sent(starts, torch.int32),
        kv_lengths=sent(lengths, torch.int32), block_tables=sent(tables.tolist(), torch.int32), block_tables_cpu=tables,
        logit_rows=kv_slots[:0], query_starts_cpu=starts, kv_lengths_cpu=lengths,
    )  # fmt: skip
    batch.more_groups = [batch.of_group(0)] * (model.cache_groups - 1)
    backend = select_backend(
        device, model.context.dtype, shape.head_dim, shape.latent, block_size=BLOCK, sinks=shape.sinks,
        windows=any(window is not None for window in shape.windows), by_torch=shape.attends_by_torch, most_tokens=len(kv_slots),
    )  # fmt: skip
    batch.attention = backend.plan(batch)
    return batch


# ---- the head --------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """What `phalanx.models.eagle3.Eagle3Head` computes, for training: of whole texts, in parameters with the names of the file."""

    def __init__(self, declared: Eagle3) -> None:
        super().__init__()
        shape, hidden = declared.shape, declared.shape.hidden_size
        self.shape, self.declared = shape, declared
        self.fc = _linear(len(declared.inner_layers) * declared.target_hidden, hidden)
        layer = self.midlayer = nn.Module()
        layer.hidden_norm, layer.input_layernorm = (nn.RMSNorm(hidden, shape.rms_norm_eps) for _ in range(2))
        layer.self_attn = attention = nn.Module()
        attention.q_proj = _linear(2 * hidden, shape.num_heads * shape.head_dim)
        attention.k_proj = _linear(2 * hidden, shape.num_kv_heads * shape.head_dim)
        attention.v_proj = _linear(2 * hidden, shape.num_kv_heads * shape.head_dim)
        attention.o_proj = _linear(shape.num_heads * shape.head_dim, hidden)
        layer.post_attention_layernorm = nn.RMSNorm(hidden, shape.rms_norm_eps)
        layer.mlp = mlp = nn.Module()
        mlp.gate_proj, mlp.up_proj = (_linear(hidden, shape.intermediate_size) for _ in range(2))
        mlp.down_proj = _linear(shape.intermediate_size, hidden)
        self.norm = nn.RMSNorm(hidden, shape.rms_norm_eps)
        self.lm_head = _linear(hidden, declared.draft_vocab)

    @torch.no_grad()
    def begin_as(self, model: Decoder, ids: Tensor) -> None:
        """Begin with the model's last inner state, final norm and LM head."""
        assert model.lm_head is not None
        assert model.norm is not None
        if self.shape.hidden_size != model.shape.hidden_size:
            return
        self.fc.weight[:, -self.shape.hidden_size :] += torch.eye(self.shape.hidden_size)
        self.norm.weight.copy_(model.norm.weight.float())
        self.lm_head.weight.copy_(model.lm_head.table.weight[ids.to(model.context.device)].float())

    def forward(
        self, states: Tensor, embedded: Tensor, cos_sin: tuple[Tensor, Tensor], passes: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """One pass, of number len(passes), which is given its keys and values. states [B, T, hidden]; embedded [B, T, hidden]: of
        the token behind each; cos_sin: of its positions. Pass n of a position sees what pass 0 has of this and the positions before
        it, and of passes 1 to n its own."""
        layer = self.midlayer
        normed = layer.hidden_norm(states)
        x = torch.cat([layer.input_layernorm(embedded), normed], -1)
        residual = normed if self.declared.norm_before_residual else states
        residual = residual + layer.self_attn.o_proj(self.attend(x, cos_sin, passes))
        x = layer.post_attention_layernorm(residual)
        residual = residual + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))
        return self.norm(residual) if self.declared.norm_output else residual

    def attend(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], passes: list[tuple[Tensor, Tensor]]) -> Tensor:
        layer, shape = self.midlayer.self_attn, self.shape
        rows, length, repeated = *x.shape[:2], shape.num_heads // shape.num_kv_heads
        q, k, v = (
            part(x).view(rows, length, -1, shape.head_dim).transpose(1, 2) for part in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        q, k = (_rotated(part, *cos_sin) for part in (q, k))
        passes.append((k.repeat_interleave(repeated, 1), v.repeat_interleave(repeated, 1)))
        (keys, values), own = passes[0], passes[1:]
        if not own:
            attended = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        else:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = [(q @ keys.mT).masked_fill(mask, -torch.inf), *((q * k).sum(-1, keepdim=True) for k, _ in own)]
            weights = (torch.cat(scores, -1) * shape.head_dim**-0.5).softmax(-1)
            attended = weights[..., :length] @ values
            for number, (_, v) in enumerate(own):
                attended = attended + weights[..., length + number, None] * v
        return attended.transpose(1, 2).reshape(rows, length, -1)

    def logits(self, states: Tensor) -> Tensor:
        return self.lm_head(states if self.declared.norm_output else self.norm(states))

    def save(self, folder: Path, ids: Tensor) -> None:
        """Write model.safetensors."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.shape.dtype]
        tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in self.state_dict().items()}
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(self.shape.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        declared = {tensor.name.replace("layers.0.", "midlayer."): tensor.shape for tensor in self.declared.tensors()}
        assert declared == {name: tuple(value.shape) for name, value in tensors.items() if name not in ("d2t", "t2d")}
        save_file(tensors, folder / "model.safetensors")


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=0.02)
    return linear


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


# ---- training --------------------------------------------------------------------------------------------------------


class Trainer:
    """Of one head. embedding [V, hidden]: the model's. ids: of the draft vocabulary."""

    def __init__(self, head: Head, embedding: Tensor, ids: Tensor, states: States, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.head, self.embedding, self.ids = head.to(self.device), embedding.to(self.device), ids.to(self.device)
        self.states, self.options = states, options
        self.rotary = Rotary(*head.shape.rotary_in(0), self.device)

    def run(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
        """The unrolled passes over some texts: the loss; and [positions, unroll] bool, whether each pass's most likely token is the
        text's, where the text has as many tokens behind the last one."""
        length, unroll = max(len(text.tokens) for text in texts), self.options.unroll
        tokens = torch.zeros(len(texts), length + unroll + 1, dtype=torch.int64)
        at = torch.full((len(texts), length + unroll + 1), -1)  # which of all states
        for row, text in enumerate(texts):
            tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
            at[row, : len(text.tokens)] = torch.arange(text.begin, text.begin + len(text.tokens))
        prompts, ends = (torch.tensor(each) for each in zip(*((text.prompt, len(text.tokens)) for text in texts), strict=True))
        first = at[:, :length].clamp(min=0)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            states = self.head.fc(self.states.inner[first].to(self.device).float())
            passes: list[tuple[Tensor, Tensor]] = []
            loss, matches = torch.zeros((), device=self.device), []
            for place in range(unroll):
                cos, sin, _ = self.rotary(torch.arange(place, place + length, device=self.device))
                embedded = F.embedding(tokens[:, place + 1 : place + 1 + length].to(self.device), self.embedding)
                states = self.head(states, embedded, (cos, sin), passes)
                predicted = torch.arange(place + 2, place + 2 + length)  # the place in the text of what is predicted
                counts = (predicted > prompts[:, None]) & (predicted < ends[:, None])
                logits = self.head.logits(states[counts.to(self.device)]).float()
                of = at[:, place + 1 : place + 1 + length][counts]
                shares, likely = self.states.shares[of].to(self.device), self.states.tokens[of].long().to(self.device)
                cross = shares * (logits.logsumexp(-1, keepdim=True) - logits.gather(1, likely))
                loss = loss + DECAY**place * cross.sum() / max(len(of), 1)
                right = torch.zeros(counts.shape, dtype=torch.bool)
                wanted = tokens[:, place + 2 : place + 2 + length][counts]
                right[counts] = self.ids[logits.argmax(-1)].cpu() == wanted
                matches.append(right)
        starts = (torch.arange(length) + 2 > prompts[:, None]) & (torch.arange(length) + 1 + unroll < ends[:, None])
        return loss / sum(DECAY**place for place in range(unroll)), torch.stack(matches, -1)[starts]

    @torch.no_grad()
    def acceptance(self, texts: Sequence[Text]) -> list[float]:
        """How often the draft at each place is the text's token, where those before it are."""
        accepted = torch.cat([self.run(group)[1] for group in groups(texts, self.options.batch_tokens)]).cumprod(-1).sum(0)
        tried = torch.cat([torch.tensor([0]), accepted])
        tried[0] = sum(max(0, len(text.tokens) - text.prompt - self.options.unroll) for text in texts)
        return (accepted / tried[:-1].clamp(min=1)).tolist()

    def report(self, texts: Sequence[Text], name: str) -> None:
        for temperature in dict.fromkeys(text.temperature for text in texts):
            rates = self.acceptance([text for text in texts if text.temperature == temperature])
            tokens = 1 + sum(math.prod(rates[: place + 1]) for place in range(len(rates)))
            print(
                f"{name}: held out, temperature {temperature:g}: accepted by place {', '.join(f'{rate:.3f}' for rate in rates)}; "
                f"{tokens:.2f} tokens a step",
                flush=True,
            )

    def epochs(self, texts: Sequence[Text], held_out: Sequence[Text]) -> None:
        options = self.options
        batches = list(groups(texts, options.batch_tokens))
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
        total = max(options.epochs * len(batches), 1)
        warmup = max(total // 20, 1)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(step / total, 1.0)) + 0.01)
        )
        self.report(held_out, "untrained")
        order, reported = torch.Generator().manual_seed(options.seed), time.monotonic()
        for epoch in range(options.epochs):
            mean = 0.0
            for number, batch in enumerate(torch.randperm(len(batches), generator=order).tolist()):
                loss, _ = self.run(batches[batch])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                mean += (loss.item() - mean) / (number + 1)
                if time.monotonic() - reported > 20:
                    reported = time.monotonic()
                    print(f"epoch {epoch + 1}: batch {number + 1} of {len(batches)}, loss {mean:.4f}", flush=True)
            self.report(held_out, f"epoch {epoch + 1}, loss {mean:.4f}")
            self.head.save(options.head, self.ids.cpu())


def train(
    options: argparse.Namespace, folder: Path, shape: ModelShape, declared: Eagle3, texts: list[Text], work: Path
) -> None:  # fmt: skip
    """Train the head, and write its weights after each epoch."""
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" or shape.dtype == "fp32" else torch.bfloat16
    model = registry.build(shape, range(shape.num_layers), LayerContext(Solo(), dtype, device))
    weights.load(model, folder)
    held_out, rest = [text for text in texts if text.held_out], [text for text in texts if not text.held_out]
    ids = draft_ids(texts, declared.draft_vocab, shape.vocab_size)
    covered = np.isin([token for text in held_out for token in text.tokens[text.prompt :]], ids.numpy()).mean()
    print(f"draft vocabulary: {len(ids)} of {shape.vocab_size} tokens, {covered:.1%} of those of held-out answers", flush=True)
    states = states_of(model, texts, declared.inner_layers, ids, work, max(options.batch_tokens, 4096))
    head = Head(declared)
    head.begin_as(model, ids)
    assert model.embed_tokens is not None
    with torch.no_grad():
        embedding = model.embed_tokens.weight[: shape.vocab_size].float() * model.embed_tokens.multiplier
    del model
    options.head.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(work / "head" / "config.json", options.head / "config.json")
    head.save(options.head, ids)
    Trainer(head, embedding, ids, states, options).epochs(rest, held_out)


if __name__ == "__main__":
    sys.exit(main())
