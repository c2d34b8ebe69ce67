# SPDX-License-Identifier: Apache-2.0
"""`/v1/rerank` and `/v1/score` of a model that answers yes or no, real ranks at tp 2: the scores are those that the model card of
Qwen3-Reranker computes with transformers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from phalanx.config.locate import locate
from phalanx.errors import OptionError
from phalanx.serve.openai.prompts import shortened
from phalanx.serve.openai.schema.embeddings import RerankResponse, ScoreList
from phalanx.serve.openai.yes_no import YesNo
from phalanx.serve.tokenizer import Tokenizer
from tests.support.checkpoints import write_checkpoint
from tests.support.serve_http_app import Scripted, live
from tests.support.serve_processes import MODEL, rank_server

pytestmark = pytest.mark.usefixtures("forked_python")

# As the model card has them.
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
    'the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"
QUERY = "What is a rank?"
DOCUMENTS = ["A rank is one process with one device.", "", "The scheduler decides; " * 4, "Yes, no, <b>&amp;</b> {{ x }}"]


def write_model(folder, **sizes):
    """A tiny Qwen3 whose tokenizer has the tokens of the prompt."""
    write_checkpoint(folder, "qwen3", vocab_size=400, max_position_embeddings=2048, tie_word_embeddings=True, **sizes)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("yes", "no", "<think>", "</think>")])
    assert backend.get_vocab_size() <= 400
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """In a folder of the reranker's name."""
    return write_model(tmp_path_factory.mktemp("checkpoint") / "Qwen3-Reranker-Tiny")


def reference_of(folder):
    """The score of a query, a document and a task: `compute_logits` of the model card."""
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    no, yes = (tokenizer.convert_tokens_to_ids(text) for text in ("no", "yes"))

    def score(query, document, task=TASK):
        pair = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        tokens = [one for text in (PREFIX, pair, SUFFIX) for one in tokenizer.encode(text, add_special_tokens=False)]
        with torch.no_grad():
            logits = network(torch.tensor([tokens])).logits[0, -1]
        return torch.stack([logits[no], logits[yes]]).log_softmax(0)[1].exp().item()

    return score


@pytest.fixture(scope="module")
def reference(model):
    return reference_of(model)


@pytest.fixture(scope="module")
def served(tmp_path_factory, model):
    """Steps of 64 tokens: each prompt comes in several."""
    flags = ["--tp_size", "2", "--max_num_tokens", "64", "--kv_block_size", "16", "--max_batch_size", "4"]
    with rank_server(tmp_path_factory.mktemp("served"), model, *flags) as running:
        running.wait_ready()
        assert "scores of pairs: by yes and no, with the prompt of Qwen3-Reranker" in running.log
        yield running


def ask(served, path, padding=0, **body):
    """padding: spaces behind the body, which make it a large one."""
    with served.http() as http:
        answer = http.post(path, content=json.dumps({"model": MODEL, **body}) + " " * padding)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_documents_are_scored_as_the_model_card_says(served, reference):
    expected = [reference(QUERY, document) for document in DOCUMENTS]
    assert max(expected) - min(expected) > 0.01, "the scores differ, or their order would say nothing"
    for path in ("/v1/rerank", "/rerank", "/v1/rerank"):  # the last time prompts are in the prefix cache
        answer = RerankResponse.model_validate(ask(served, path, query=QUERY, documents=DOCUMENTS, return_documents=True))
        assert [one.index for one in answer.results] == sorted(range(4), key=lambda index: -expected[index])
        for one in answer.results:
            assert one.relevance_score == pytest.approx(expected[one.index], abs=2e-5)
            assert one.document == {"text": DOCUMENTS[one.index]}
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 400


def test_an_instruction_takes_the_place_of_the_usual_one(served, reference):
    task = "Find the opposite"
    (one,) = ask(served, "/v1/rerank", query=QUERY, documents=DOCUMENTS[:1], instruction=task)["results"]
    assert one["relevance_score"] == pytest.approx(reference(QUERY, DOCUMENTS[0], task), abs=2e-5)
    assert abs(reference(QUERY, DOCUMENTS[0], task) - reference(QUERY, DOCUMENTS[0])) > 1e-4


def test_documents_are_cut_and_not_what_stands_around_them(served, model, reference):
    """At tokens: a document of as many is left as it is."""
    tokenizer = Tokenizer.load(model)
    long = "The scheduler decides; äöü " * 200
    tokens = tokenizer.encode(long, add_special_tokens=False)
    for count in (1, 7, 40):
        cut = tokenizer.decode(tokens[:count]).rstrip("\ufffd")
        for padding in (0, 2**18):
            answer = ask(served, "/v1/rerank", padding, query=QUERY, documents=[long, "x"], max_tokens_per_doc=count)
            scores = {one["index"]: one["relevance_score"] for one in answer["results"]}
            assert scores == {0: pytest.approx(reference(QUERY, cut), abs=2e-5), 1: pytest.approx(reference(QUERY, "x"), abs=2e-5)}
    exact = DOCUMENTS[0]
    (one,) = ask(served, "/rerank", query=QUERY, documents=[exact], max_tokens_per_doc=len(tokenizer.encode(exact)))["results"]
    assert one["relevance_score"] == pytest.approx(reference(QUERY, exact), abs=2e-5)


@pytest.mark.parametrize(
    ("text", "count", "cut"),
    [
        ("a few", 3, None), ("日本語のテ", 5, "日"), ("😀😀 hello", 1, "😀"), ("😀😀 hello", 3, "😀"),
        ("a\ufffd" * 9, 4, "a\ufffd"),
        ("", 1, ""), ("plain", None, "plain"),
    ],
)  # fmt: skip
def test_a_cut_is_no_part_of_a_character_and_never_empty(text, count, cut):
    """A token of this tokenizer is a byte or more."""
    tokenizer = Tokenizer.load(locate("demo"))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    result = shortened(text, count, SimpleNamespace(tokenizer=tokenizer))
    assert text.startswith(result)
    assert bool(result) == bool(text)
    assert "\ufffd" not in result or "\ufffd" in text
    assert len(tokenizer.encode(result, add_special_tokens=False)) <= max(count or len(tokens), len(tokenizer.encode(text[:1])))
    assert result == (cut if cut is not None else tokenizer.decode(tokens[:count]))


def test_scores_of_pairs(served, reference):
    one_with_many = ScoreList.model_validate(ask(served, "/v1/score", text_1=QUERY, text_2=DOCUMENTS))
    assert [one.index for one in one_with_many.data] == [0, 1, 2, 3]
    for one, document in zip(one_with_many.data, DOCUMENTS, strict=True):
        assert one.score == pytest.approx(reference(QUERY, document), abs=2e-5)
    queries = [QUERY, "another", "x", QUERY]
    for one, query, document in zip(
        ask(served, "/score", text_1=queries, text_2=DOCUMENTS)["data"], queries, DOCUMENTS, strict=True
    ):
        assert one["score"] == pytest.approx(reference(query, document), abs=2e-5)
    (single,) = ask(served, "/score", text_1=QUERY, text_2="x")["data"]
    assert single["score"] == pytest.approx(reference(QUERY, "x"), abs=2e-5)


def test_a_large_body_says_the_same(served):
    for path, fields in (
        ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "return_documents": True, "instruction": "Judge."}),
        ("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
    ):
        small, large = ask(served, path, **fields), ask(served, path, **fields, padding=2**18)
        lists = [answer.pop("results", None) or answer.pop("data") for answer in (small, large)]
        assert {**small, "id": ""} == {**large, "id": ""}
        for one, other in zip(*lists, strict=True):
            assert other == {**one, **{name: pytest.approx(one[name], abs=1e-6) for name in one if "score" in name}}


def test_vectors_and_texts_come_beside_scores(served, reference):
    """Steps have rows that want a vector, logits or a token."""
    with served.openai() as client:
        stream = client.completions.create(model=MODEL, prompt="x", max_tokens=60, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        vector = client.embeddings.create(model=MODEL, input=DOCUMENTS[2]).data[0].embedding
        (one,) = ask(served, "/v1/rerank", query=QUERY, documents=DOCUMENTS[2:3])["results"]
        assert sum(1 for _ in stream) > 1
    assert len(vector) == 48
    assert one["relevance_score"] == pytest.approx(reference(QUERY, DOCUMENTS[2]), abs=2e-5)


def test_what_is_refused_names_the_text(served):
    for path, fields, param in (
        ("/v1/rerank", {"query": "x", "documents": ["y", "word " * 3000]}, "documents[1]"),
        ("/rerank", {"query": "x", "documents": ["y", "word " * 3000]}, "documents[1]"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["y", "word " * 3000]}, "text_2[1]"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["y"]}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": ["y"]}, "text_1"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "instruction": ""}, "instruction"),
    ):
        with served.http() as http:
            answer = http.post(path, json={"model": MODEL, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_texts_that_are_compared_by_vectors():
    """The fake engine's vectors begin with a text's tokens."""
    with live(Scripted("x")) as server, server.client() as http:
        same, other = http.post("/v1/score", json={"model": MODEL, "text_1": ["a b", "a b"], "text_2": ["a b", "q"]}).json()["data"]
        assert same["score"] == pytest.approx(1.0, abs=1e-6)
        assert other["score"] < 1.0
        for path, fields, param in (
            ("/v1/rerank", {"query": "x", "documents": ["y", ""]}, "documents[1]"),
            ("/rerank", {"query": "x", "documents": ["y", {"text": ""}]}, "documents[1]"),
            ("/score", {"text_1": "x", "text_2": ["y", ""]}, "text_2[1]"),
            ("/v1/score", {"text_1": "", "text_2": "y"}, "text_1[0]"),
            ("/v1/rerank", {"query": "x", "documents": ["y"], "instruction": "z"}, "instruction"),
        ):
            answer = http.post(path, json={"model": MODEL, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_which_models_answer_yes_or_no(model, tmp_path, caplog):
    tokenizer = Tokenizer.load(model)
    for name in ("Qwen/Qwen3-Reranker-0.6B", "/models/qwen3-reranker-4b"):
        assert YesNo.detect("auto", name, tokenizer) is not None
    assert YesNo.detect("cosine", "Qwen/Qwen3-Reranker-0.6B", tokenizer) is None
    assert YesNo.detect("yes_no", "ours", tokenizer) is not None
    assert YesNo.detect("auto", "Qwen/Qwen3-Embedding-0.6B", tokenizer) is None
    assert not caplog.records or "unknown kind" not in caplog.text
    assert YesNo.detect("auto", "BAAI/bge-reranker-v2-gemma", tokenizer) is None
    assert "a reranker of an unknown kind" in caplog.text
    plain = write_checkpoint(tmp_path, "llama")
    with pytest.raises(OptionError, match="no tokens 'yes' and 'no'"):
        YesNo.detect("yes_no", "ours", Tokenizer.load(plain))


def test_a_template_of_the_operator_is_used_where_it_has_the_roles_of_pairs(model):
    tokenizer = Tokenizer.load(model)
    letter = "'Q' if m.role == 'query' else 'D' if m.role == 'document' else 'S'"
    source = "{% for m in messages %}[{{ " + letter + " }}:{{ m.content }}]{% endfor %}"
    tokenizer.set_chat_template(source, origin="the test")
    scorer = YesNo.detect("yes_no", "ours", tokenizer)
    assert scorer.render([{"role": "query", "content": "a"}, {"role": "document", "content": "b"}]) == "[Q:a][D:b]"


@pytest.mark.gpu1
def test_scores_of_a_gpu_with_graphs(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    folder = write_model(tmp_path / "Qwen3-Reranker-Tiny", dtype=torch.bfloat16, std=0.05, **sizes)
    score = reference_of(folder)
    with rank_server(tmp_path, folder, "--device", "cuda", "--max_num_tokens", "64") as running:
        running.wait_ready(300)
        for documents in (DOCUMENTS, DOCUMENTS[:1], DOCUMENTS):  # of one token alone: a decode graph would leave no hidden states
            for one in ask(running, "/v1/rerank", query=QUERY, documents=documents)["results"]:
                assert one["relevance_score"] == pytest.approx(score(QUERY, documents[one["index"]]), abs=0.03)
