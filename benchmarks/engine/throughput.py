# SPDX-License-Identifier: Apache-2.0
"""Demo model, 64 requests on CPU: Phalanx's continuous batching beside transformers' `generate` called one by one, in one run.

Both get the same token ids, the same number of new tokens, greedy, fp32, and all cores. Prints output tokens per second of each.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks import harness

TARGET = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    prompts = [[3 + (17 * i + 31 * j) % 500 for j in range(args.prompt_tokens)] for i in range(args.requests)]
    theirs = [transformers_tokens_per_second(prompts, args.new_tokens)]
    ours = phalanx_tokens_per_second(prompts, args.new_tokens, args.repeats)
    theirs.append(transformers_tokens_per_second(prompts, args.new_tokens))
    ratio = ours["best"] / max(theirs)
    print(f"transformers generate, one by one: {max(theirs):8.1f} tokens/s (before {theirs[0]:.1f}, after {theirs[1]:.1f})")
    print(f"phalanx, {args.requests} requests at once:  {ours['best']:8.1f} tokens/s")
    print(f"ratio: {ratio:.1f} (at least {TARGET:.0f} is asked for)")
    figures = {"asked": vars(args), "transformers_tokens_per_s": theirs, "phalanx_tokens_per_s": ours, "ratio": ratio}
    print(f"written: {harness.write('engine_throughput_cpu', figures).relative_to(harness.ROOT)}")
    return 0 if ratio >= TARGET else 1


def phalanx_tokens_per_second(prompts: list[list[int]], new_tokens: int, repeats: int) -> dict[str, object]:
    from phalanx import LLM, SamplingParams

    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
    rates = []
    with LLM("demo", max_batch_size=len(prompts), enable_prefix_caching=False, device="cpu") as llm:
        llm.generate(prompts[:2], params, use_tqdm=False)
        for _ in range(repeats):
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            produced = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert produced == len(prompts) * new_tokens, f"{produced} tokens came out"
            rates.append(produced / seconds)
    return {"best": max(rates), "all": rates}


def transformers_tokens_per_second(prompts: list[list[int]], new_tokens: int) -> float:
    """One pass over an eighth of the prompts (each costs the same), after a warm-up."""
    import torch
    from transformers import AutoModelForCausalLM

    from phalanx.config.locate import locate

    model = AutoModelForCausalLM.from_pretrained(locate("demo"), dtype=torch.float32, trust_remote_code=False).eval()
    few = prompts[: max(4, len(prompts) // 8)]

    def generate(prompt: list[int]) -> int:
        ids = torch.tensor([prompt])
        produced = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return produced.shape[1] - len(prompt)

    generate(few[0])
    begin = time.perf_counter()
    produced = sum(generate(prompt) for prompt in few)
    return produced / (time.perf_counter() - begin)


if __name__ == "__main__":
    sys.exit(main())
