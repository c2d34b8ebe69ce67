# SPDX-License-Identifier: Apache-2.0
"""`/v1/embeddings` and `/v1/rerank` at tp 2, and pp 2, real ranks over a tiny checkpoint: the vectors are those of transformers."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest
import torch
import transformers

from phalanx.serve.openai.schema.embeddings import EmbeddingList, RerankResponse
from phalanx.serve.tokenizer import Tokenizer
from tests.support.checkpoints import write_checkpoint
from tests.support.serve_http_app import Scripted, live
from tests.support.serve_processes import MODEL, rank_server, until

pytestmark = pytest.mark.usefixtures("forked_python")

TEXTS = [
    "What is a rank?",
    "A rank is one process with one device.",
    "x",
    "The scheduler decides which requests run in a step; " * 4,
]


def write_model(folder, **sizes):
    """As Qwen3-Embedding is stored: of the base class, without a head."""
    write_checkpoint(folder, "qwen3", tie_word_embeddings=True, **sizes)
    with_head = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with_head.model.save_pretrained(folder)
    config = (folder / "config.json").read_text(encoding="utf-8").replace("Qwen3Model", "Qwen3ForCausalLM")
    (folder / "config.json").write_text(config, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("embed"))


@pytest.fixture(scope="module", params=["last", "mean"])
def served(request, tmp_path_factory, model):
    """Steps of 16 tokens: long texts come in several."""
    stages = ["--pp_size", "2"] if request.param == "mean" else []
    flags = ["--tp_size", "2", *stages, "--pooling", request.param, "--max_num_tokens", "16", "--kv_block_size", "4"]
    flags += ["--max_batch_size", "4", "--max_num_queued_reqs", "2", "--log_requests", "--log_format", "json"]
    with rank_server(tmp_path_factory.mktemp("served"), model, *flags) as running:
        yield running.wait_ready(), request.param


@pytest.fixture(scope="module")
def reference(model):
    return reference_of(model)


def reference_of(folder):
    """By the way of pooling and a text, its vector."""
    network = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.load(folder)

    def vector(pooling, text):
        tokens = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            states = network(input_ids=tokens).last_hidden_state[0]
        return (states[-1] if pooling == "last" else states.mean(0)).numpy()

    return vector


def unit(vector):
    return vector / np.linalg.norm(vector)


def embed(served, **fields):
    with served.http() as http:
        answer = http.post("/v1/embeddings", json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    return EmbeddingList.model_validate(answer.json())


def test_vectors_are_those_of_transformers(served, reference):
    running, pooling = served
    expected = np.stack([reference(pooling, text) for text in TEXTS])
    for _ in range(2):  # the second time prompts are in the prefix cache
        answer = embed(running, input=TEXTS, normalize=False)
        vectors = np.array([one.embedding for one in answer.data], dtype=np.float32)
        assert [one.index for one in answer.data] == [0, 1, 2, 3]
        np.testing.assert_allclose(vectors, expected, atol=2e-4, rtol=1e-3)
    with running.openai() as client:  # it asks for base64, and decodes it
        official = client.embeddings.create(model=MODEL, input=TEXTS, dimensions=8)
    for one, vector in zip(official.data, expected, strict=True):
        np.testing.assert_allclose(one.embedding, unit(vector[:8]), atol=2e-4)
    assert official.usage.prompt_tokens == official.usage.total_tokens > 50


def test_token_ids_of_one_token_and_streams_beside(served, reference, model):
    running, pooling = served
    token = Tokenizer.load(model).encode("x")[-1]
    (single,) = embed(running, input=[token]).data
    (listed,) = embed(running, input=[[token]]).data
    assert single.embedding == listed.embedding
    assert np.linalg.norm(single.embedding) == pytest.approx(1.0, abs=1e-5)
    with running.openai() as client:
        ask = {"model": MODEL, "prompt": TEXTS[0], "max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
        alone = client.completions.create(**ask).choices[0].text
        stream = client.completions.create(**ask, stream=True)
        text = next(stream).choices[0].text
        answer = embed(running, input=TEXTS[3], normalize=False)
        text += "".join(chunk.choices[0].text for chunk in stream)
    np.testing.assert_allclose(answer.data[0].embedding, reference(pooling, TEXTS[3]), atol=2e-4, rtol=1e-3)
    assert text == alone


def test_many_texts_share_the_places_of_the_engine(served):
    running, _ = served
    texts = [f"Text {number}." for number in range(19)]
    many = embed(running, input=texts)
    of_many = until(
        lambda: [line for text in running.log.splitlines() if '"/v1/embeddings"' in text
                 if (line := json.loads(text))["completion_tokens"] == 19]
    )  # fmt: skip
    assert of_many[-1]["prompt_tokens"] == many.usage.prompt_tokens
    assert [one.index for one in many.data] == list(range(19))
    for number in (0, 4, 18):
        np.testing.assert_allclose(many.data[number].embedding, embed(running, input=texts[number]).data[0].embedding, atol=2e-4)


def test_documents_are_ordered_by_cosines(served, reference):
    running, pooling = served
    query, *documents = TEXTS
    body = {"model": MODEL, "query": query, "documents": [*documents[:-1], {"text": documents[-1]}, query], "top_n": 3}
    with running.http() as http:
        answer = http.post("/v1/rerank", json=body)
        others = [http.post(path, json=body) for path in ("/rerank", "/v2/rerank")]  # as LiteLLM and Cohere's client ask
        returned = http.post("/v1/rerank", json={**body, "return_documents": True}).json()["results"]
    assert all(one["document"] == {"text": [*documents, query][one["index"]]} for one in returned)
    assert all(one.keys() == {"index", "relevance_score"} for one in answer.json()["results"])
    for other in others:
        assert [one["index"] for one in other.json()["results"]] == [one["index"] for one in answer.json()["results"]]
    result = RerankResponse.model_validate(answer.json())
    vectors = [unit(reference(pooling, text)) for text in TEXTS]
    scores = [float(vector @ vectors[0]) for vector in vectors[1:]] + [1.0]
    assert [one.index for one in result.results] == sorted(range(4), key=lambda i: -scores[i])[:3]
    for one in result.results:
        assert one.relevance_score == pytest.approx(scores[one.index], abs=1e-4)


def test_what_is_refused(served):
    running, _ = served
    with running.openai() as client:
        for fields, message in (
            ({"input": "x", "dimensions": 4096}, "dimensions=4096 exceeds the 48"), ({"input": ""}, "prompt is empty"),
            ({"input": "x " * 400}, "max_seq_len"), ({"input": [99_999]}, "99999"),
            ({"input": ["x", ""]}, r"input\[1\]: the prompt is empty"), ({"input": [[5], [99_999]]}, r"input\[1\]: token id"),
            ({"input": [[5], [5] * 4000]}, r"input\[1\]: .*max_seq_len"), ({"input": ["x", "x " * 9000]}, r"input\[1\]: .*max_seq"),
            ({"input": ["x", 5]}, r"input\[1\]: Input should be a valid string$"), ({"input": []}, "at least 1 item"),
            ({"input": ["x"] * 2049}, "at most 2048 items"),
        ):  # fmt: skip
            with pytest.raises(openai.BadRequestError, match=message) as raised:
                client.embeddings.create(model=MODEL, **fields)
            assert raised.value.param.startswith(("input", "dimensions"))
    for documents, field in ((["x", ""], "documents[1]"), (["x "] * 2048, "documents"), ([{"image": "x"}], "documents[0].text")):
        with running.http() as http:
            answer = http.post("/v1/rerank", json={"model": MODEL, "query": "x", "documents": documents})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.gpu1
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_of_a_gpu_with_graphs(tmp_path, pooling):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    folder = write_model(tmp_path / "model", dtype=torch.bfloat16, std=0.05, **sizes)
    vector = reference_of(folder)
    with rank_server(tmp_path, folder, "--device", "cuda", "--pooling", pooling, "--max_num_tokens", "64") as running:
        running.wait_ready(300)
        for texts in (TEXTS, ["x"], TEXTS):  # of one token alone: a decode graph would leave no hidden states
            vectors = [one.embedding for one in embed(running, input=texts).data]
            assert min(float(np.dot(one, unit(vector(pooling, text)))) for one, text in zip(vectors, texts, strict=True)) > 0.999


def test_groups_with_attention_of_their_own_make_no_vectors():
    engine = Scripted("x")
    engine.facts.layout = type(engine.facts.layout)(dp=2)
    with live(engine) as server, server.openai() as client, pytest.raises(openai.BadRequestError, match="expert_parallel_size=1"):
        client.embeddings.create(model=MODEL, input="x")
