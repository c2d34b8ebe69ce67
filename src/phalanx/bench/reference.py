# SPDX-License-Identifier: Apache-2.0
"""What transformers gives for texts: log probabilities of their tokens, and greedy continuations. In a process of its own, so that
its memory is free before an engine starts, and its failure ends nothing.

    python -m phalanx.bench.reference FOLDER DEVICE TEXTS OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

GREEDY_TOKENS = 32
"""New tokens of each continuation."""


def main(folder: str, device: str, texts: str, out: str) -> None:
    """TEXTS: a file with a JSON list of texts. OUT: the file that is written, a JSON list of what `reference_of` gives."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    model = model.to(device).eval()
    with torch.inference_mode():
        results = [reference_of(model, tokenizer, text, device) for text in json.loads(Path(texts).read_text(encoding="utf-8"))]
    Path(out).write_text(json.dumps(results), encoding="utf-8")


def reference_of(model: Any, tokenizer: Any, text: str, device: str) -> dict[str, Any]:
    """tokens [T]: ids of the text. logprobs [T - 1]: of tokens 1 on, natural logarithm. best [T - 1]: the most probable token at
    each of these places. greedy: the text of the GREEDY_TOKENS tokens that follow."""
    import torch

    tokens = tokenizer(text)["input_ids"]
    ids = torch.tensor([tokens], device=device)
    logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
    greedy = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GREEDY_TOKENS, min_new_tokens=GREEDY_TOKENS,
        num_beams=1, repetition_penalty=1.0,
    )  # fmt: skip
    return {
        "tokens": tokens,
        "logprobs": logprobs.gather(1, ids[0, 1:].unsqueeze(1)).squeeze(1).tolist(),
        "best": logprobs.argmax(-1).tolist(),
        "greedy": tokenizer.decode(greedy[0, len(tokens) :], skip_special_tokens=True),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
