# SPDX-License-Identifier: Apache-2.0
"""Logits that are NaN: the request ends with an error, and another beside it gets its tokens."""

from __future__ import annotations

import re

import openai
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import write_checkpoint
from tests.support.serve_processes import MODEL, rank_server

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint in which the embedding of one token is NaN: prompts with it have no finite logits."""
    folder = write_checkpoint(tmp_path_factory.mktemp("nonfinite"), "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("flags", [(), ("--tp-size", "2"), ("--pp-size", "2")], ids=["tp1", "tp2", "pp2"])
def test_a_request_without_finite_logits_ends_with_an_error(flags, model, tmp_path):
    prompt = [5, 6, 9, 11]
    reference = transformers.AutoModelForCausalLM.from_pretrained(model)
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 4:]
    text = transformers.AutoTokenizer.from_pretrained(model).decode(expected, skip_special_tokens=True)
    with rank_server(tmp_path, model, *flags) as running:
        served = running.wait_ready()
        assert len(re.findall(r"hold values that are NaN or infinite.*model\.embed_tokens\.weight", served.log)) >= 1
        with served.openai() as client:

            def complete(tokens, **fields):
                return client.completions.create(model=MODEL, prompt=tokens, max_tokens=8, **fields)

            faulty = [
                {"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 0, "logprobs": 3},
                {"temperature": 1.0, "frequency_penalty": 1.0}, {"temperature": 0, "logit_bias": {"5": 10}},
            ]  # fmt: skip
            for fields in faulty:
                with pytest.raises(openai.InternalServerError, match="logits of token 4 are NaN or infinite") as caught:
                    complete([5, 7, 9, 11], **fields)
                assert caught.value.body["code"] == "logits_not_finite"
            sound = complete(prompt, temperature=0, extra_body={"ignore_eos": True})
            assert sound.choices[0].text == text
            with pytest.raises(openai.APIError, match="NaN or infinite"):
                list(complete([5, 7, 9, 11], temperature=0, stream=True))
        assert served.metric("nonfinite_requests_total") == len(faulty) + 1
        assert served.log.count("are NaN or infinite; ") >= len(faulty) + 1
