# SPDX-License-Identifier: Apache-2.0
"""The tokenizer against transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ModelError, ModelNotFound, RequestError
from phalanx.serve.tokenizer import Tokenizer
from tests.support.serve_small_tokenizers import byte_level, sentencepiece, write

pytestmark = pytest.mark.usefixtures("forked_python")

LISTED = {
    "900": {"content": "<late>", "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False},
}  # fmt: skip
FOLDERS = {
    "byte_level": (byte_level, {}),
    "begin_and_end": (byte_level, {"add_bos_token": True, "add_eos_token": True}),
    "no_begin": (byte_level, {"add_bos_token": False}),
    "other_end": (byte_level, {"eos_token": "<tool>", "unk_token": "hello", "additional_special_tokens": ["<more>"]}),
    "sentencepiece": (sentencepiece, {"add_bos_token": True, "add_eos_token": False}),
    "late_tokens": (byte_level, {"added_tokens_decoder": LISTED, "pad_token": "<pad>", "additional_special_tokens": ["<tool>"]}),
    "tokens_as_dicts": (byte_level, {"eos_token": {"content": "</s>", "__type": "AddedToken", "special": True}}),
}
TEXTS = ["hello world", "", " two  spaces ", "你好 🙂 é", "<s>in text</s><tool>x<late><pad>", "line\n\nline\t", "\x00\x07", "�"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    from transformers import AutoTokenizer

    tokenizers = {}
    for name, (make, config) in FOLDERS.items():
        folder = write(tmp_path_factory.mktemp(name), make(), **config)
        tokenizers[name] = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    return tokenizers


@pytest.mark.parametrize("name", FOLDERS)
def test_equals_transformers(pairs, name):
    ours, theirs = pairs[name]
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)


@settings(deadline=None, max_examples=60)
@given(st.text(), st.sampled_from(["byte_level", "sentencepiece", "late_tokens"]))
def test_any_text_equals_transformers(pairs, text, name):
    ours, theirs = pairs[name]
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f<&>", "parameters": {}}}]])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_equals_transformers(pairs, tools, prompt):
    ours, theirs = pairs["byte_level"]
    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "你好 <b>"}]
    expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
    assert ours.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt) == expected
    assert ours.encode_chat(messages, tools=tools, add_generation_prompt=prompt) == theirs.encode(
        expected, add_special_tokens=False
    )


def test_chat_content_in_parts(pairs):
    ours, _ = pairs["byte_level"]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    expected = ours.apply_chat_template([{"role": "user", "content": "one\ntwo"}])
    assert ours.apply_chat_template([{"role": "user", "content": parts}]) == expected


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "alien", "content": "x"}], "Unknown role: alien"),
        ([{"content": "x"}], "^a message must be a dict with a role"),
        (["x"], "^a message must be a dict with a role"),
        ([{"role": "user", "content": 3}], "^the content of a message must be a string or a list of text parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "a part that is not of type 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part that is not of type 'text'"),
        ([{"role": "user", "content": "x", "more": object()}], "^messages and tools must be JSON values"),
    ],
)
def test_bad_messages(pairs, messages, message):
    with pytest.raises(RequestError, match=message):
        pairs["byte_level"][0].apply_chat_template(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}", "{{ messages.append(1) }}",
        "{{ 1 / 0 }}", "{{ raise_exception.__globals__.x }}", "{{ none.x.y }}",
    ],
)  # fmt: skip
def test_a_template_runs_in_a_sandbox(tmp_path, template):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level(300), chat_template=template))
    with pytest.raises(RequestError, match="chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_where_templates_stand(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    folder = write(tmp_path, byte_level(300), chat_template=named)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "with tools"
    (folder / "chat_template.jinja").write_text("of the file", encoding="utf-8")
    assert Tokenizer.load(folder).apply_chat_template([]) == "of the file"
    tokenizer.set_chat_template("given", origin="--chat_template")
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "given"
    with pytest.raises(ModelError, match="--chat_template cannot be compiled"):
        tokenizer.set_chat_template("{% if", origin="--chat_template")


def test_no_template_says_so(tmp_path):
    with pytest.raises(RequestError, match="has no chat template"):
        Tokenizer.load(write(tmp_path, byte_level(300), chat_template=None)).apply_chat_template([])


def test_saved_truncation_and_padding_do_not_change_prompts(tmp_path):
    backend = byte_level(300)
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=64)
    assert (
        len(Tokenizer.load(write(tmp_path, backend)).encode("hello " * 20))
        == 1 + len(byte_level(300).encode("hello " * 20).ids) - 1
    )


def test_broken_and_missing_files(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    folder = write(tmp_path / "broken", byte_level(300))
    (folder / "tokenizer.json").write_text('{"version": "1.0"', encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json of broken cannot be read"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ModelError, match="not a JSON object"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_continuation(pairs, name):
    """Two parts decode to the whole text: no space comes between them, and no special token."""
    ours, _ = pairs[name]
    for first, second in (("a <", "/s> b"), ("world", " world"), ("two", "\n\nline"), ("é", ""), ("", "x")):
        ids = ours.encode(first, add_special_tokens=False) + ours.encode_continuation(second)
        assert ours.decode(ids).lstrip() == first + second


def test_text_that_is_not_unicode(pairs):
    with pytest.raises(RequestError, match="not valid Unicode"):
        pairs["byte_level"][0].encode("\ud800")


def test_ids_without_a_text_decode_to_nothing(pairs):
    ours, _ = pairs["byte_level"]
    ids = ours.encode("hello")
    assert ours.decode([*ids, 10**6]) == "hello"


def test_many_threads(pairs):
    ours, _ = pairs["byte_level"]
    texts = [f"{i} hello 你好 {i * 7}" for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert [ours.decode(ids) for ids in pool.map(ours.encode, texts)] == texts
        prompts = pool.map(lambda text: ours.apply_chat_template([{"role": "user", "content": text}]), texts)
        assert [text in prompt for text, prompt in zip(texts, prompts, strict=True)] == [True] * 200


@pytest.mark.usefixtures("new_interpreters")
def test_loading_does_not_wait_for_transformers(tmp_path):
    folder = write(tmp_path, byte_level(300))
    code = f"import sys; from phalanx.serve.tokenizer import Tokenizer; t = Tokenizer.load({str(folder)!r});"
    code += "t.apply_chat_template([]); import json; print(json.dumps(sorted({'torch', 'transformers'} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("file", ["vocab.json", "tokenizer.model", "vocab.txt"])
def test_code_of_a_checkpoint_is_never_run(tmp_path, file):
    """Without tokenizer.json transformers reads the folder, and would ask on standard input whether to run its code."""
    (tmp_path / file).write_text("{}", encoding="utf-8")
    (tmp_path / "merges.txt").write_text("", encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}', encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}', encoding="utf-8"
    )
    (tmp_path / "evil.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
        f"pathlib.Path({str(tmp_path / 'ran')!r}).touch()\nclass Evil: pass\nclass Config: pass\n", encoding="utf-8"
    )  # fmt: skip
    code = (
        "import pathlib, sys\nfrom phalanx.errors import ModelError\nfrom phalanx.serve.tokenizer import Tokenizer\n"
        f"try:\n    Tokenizer.load(pathlib.Path({str(tmp_path)!r}))\nexcept ModelError as error:\n    print(error)\n"
        "print('left of the input:', sys.stdin.read())"
    )
    process = subprocess.run([sys.executable, "-c", code], input="y\ny\ny", capture_output=True, text=True, check=True)
    assert not (tmp_path / "ran").exists()
    assert "cannot be converted" in process.stdout
    assert "left of the input: y\ny\ny" in process.stdout, "a question was put to standard input"


def test_long_texts_leave_the_interpreter_lock(tmp_path):
    """A long text or list of ids takes another way through the library, with the same result."""
    tokenizer = Tokenizer.load(write(tmp_path, byte_level()))
    text = "This is a rank. " * 400
    ids = tokenizer.encode(text)
    assert ids == tokenizer.backend.encode(text).ids
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == text
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("x" * 5000 + "\ud800")


def test_the_text_of_a_token_is_decoded_once(tmp_path, monkeypatch):
    """Scores have twenty tokens at each position; decoding each took most of their time."""
    tokenizer = Tokenizer.load(write(tmp_path, byte_level()))
    texts = [tokenizer.token_text(token) for token in range(tokenizer.vocab_size + 2)]
    decoded = []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **_: decoded.append(ids) or "?")
    assert [tokenizer.token_text(token) for token in range(tokenizer.vocab_size)] == texts[:-2]
    assert decoded == []
    assert tokenizer.token_text(tokenizer.vocab_size + 1) == "?", "only those of the vocabulary are kept"
