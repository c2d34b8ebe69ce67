# SPDX-License-Identifier: Apache-2.0
"""Tokenizer folders in all historic forms against transformers' AutoTokenizer.

Where a random folder fails, a line names its seed.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
from importlib.util import find_spec
from random import Random

import pytest
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers

from phalanx.errors import ModelError
from phalanx.serve import tokenizer_folder
from phalanx.serve.tokenizer import Tokenizer
from tests.support.fuzz import fuzz_seeds
from tests.support.serve_small_tokenizers import TEXT, byte_level, write
from tests.support.serve_tokenizer_folders import text_of, write_folder

pytestmark = pytest.mark.usefixtures("forked_python")


def by_transformers(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def flags(tokens):
    return {token_id: repr(token) for token_id, token in tokens.items()}


def require_equal(ours, theirs, texts):
    assert ours.special == theirs.special_tokens_map
    assert flags(ours.backend.get_added_tokens_decoder()) == flags(theirs.added_tokens_decoder)
    assert ours.eos_token_id == theirs.eos_token_id
    for text in texts:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text


def test_random_folders_equal_transformers(tmp_path):
    compared = 0
    with fuzz_seeds(120) as seeds:
        for seed in seeds:
            random, folder = Random(seed), tmp_path / str(seed)
            seeds.case = json.dumps(write_folder(folder, random))
            try:
                theirs = by_transformers(folder)
            except (TypeError, NotImplementedError):  # it refuses `add_prefix_space: null` and Python classes, which are read here
                theirs = None
            ours = Tokenizer.load(folder)
            if theirs is not None:
                require_equal(ours, theirs, [text_of(random) for _ in range(6)])
                compared += 1
            shutil.rmtree(folder)
    assert compared > 0.9 * seeds.count
    print(f"{compared} folders")


PLAIN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}


def test_flags_of_the_config_win(tmp_path):
    """<tool> of tokenizer.json strips nothing; the config says that it strips the space before it and is special."""
    stated = {"366": {"content": "<tool>", **PLAIN, "lstrip": True, "special": True}}
    folder = write(tmp_path, byte_level(), added_tokens_decoder=stated)
    ours = Tokenizer.load(folder)
    assert ours.decode(ours.encode("a <tool>b", add_special_tokens=False)) == "ab"
    require_equal(ours, by_transformers(folder), ["a <tool>b"])


@pytest.mark.parametrize("stated", [True, False])
def test_when_the_special_tokens_map_wins(tmp_path, stated):
    """It wins over tokenizer_config.json in folders of old versions, which have no `added_tokens_decoder`."""
    more = {"added_tokens_decoder": {"0": {"content": "<s>", **PLAIN, "special": True}}} if stated else {}
    folder = write(tmp_path, byte_level(), **more)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<tool>", "pad_token": {"content": "<p>", **PLAIN}}))
    ours = Tokenizer.load(folder)
    assert ours.special["eos_token"] == ("</s>" if stated else "<tool>")
    assert ours.special.get("pad_token") == (None if stated else "<p>")
    require_equal(ours, by_transformers(folder), ["a <tool><p> b</s>"])


def test_tokens_of_old_versions_stand_as_objects_in_the_special_tokens_map(tmp_path):
    """Which transformers 5 no longer reads."""
    folder = write(tmp_path, byte_level())
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": [{"content": "<x>", **PLAIN}]}))
    ours = Tokenizer.load(folder)
    assert ours.backend.token_to_id("<x>") in ours.special_ids


@pytest.mark.parametrize("value", [5, {"text": "x"}, ["<s>"]])
def test_a_token_that_is_none(tmp_path, value):
    with pytest.raises(ModelError, match="neither a string nor an object with content"):
        Tokenizer.load(write(tmp_path, byte_level(), eos_token=value))


VALUES = {
    "model_max_length": 7, "max_len": 7, "max_length": 7, "padding_side": "left", "truncation_side": "left", "stride": 3,
    "truncation_strategy": "longest_first", "pad_to_multiple_of": 8, "pad_token_type_id": 1, "padding": "max_length",
    "truncation": True, "model_input_names": ["input_ids"], "sp_model_kwargs": {}, "device_map": "auto", "errors": "strict",
    "files_loaded": [], "init_inputs": [], "chat_control_tokens": ["<s>"], "response_schema": {}, "response_template": "x",
}  # fmt: skip


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_harmless_fields_are_harmless(tmp_path, caplog, name):
    fields = {
        field: VALUES.get(field, "x" if field.endswith(("file", "_path")) else True) for field in tokenizer_folder.FIELDS.harmless
    }
    ours = Tokenizer.load(write(tmp_path, byte_level(), tokenizer_class=name, **fields))
    assert not caplog.records
    require_equal(ours, by_transformers(write(tmp_path / "with", byte_level(), tokenizer_class=name, **fields)), TEXT)
    require_equal(ours, by_transformers(write(tmp_path / "without", byte_level(), tokenizer_class=name)), TEXT)


def test_each_field_has_one_place():
    table = [*tokenizer_folder.FIELDS.honoured, *tokenizer_folder.FIELDS.harmless, *tokenizer_folder.NOT_HONOURED]
    assert len(table) == len(set(table))


def test_one_warning_names_what_has_no_effect(tmp_path, caplog):
    folder = write(tmp_path, byte_level(), clean_up_tokenization_spaces=True, do_lower_case=True, alpha=0.1)
    Tokenizer.load(folder)
    (record,) = caplog.records
    assert "clean_up_tokenization_spaces (" in record.getMessage()
    assert "alpha, do_lower_case (" in record.getMessage()


def test_the_classes_of_model_types_are_those_of_transformers():
    from transformers.models.auto import tokenization_auto

    registered = {name: tokenization_auto.TOKENIZER_MAPPING_NAMES.get(name) for name in tokenizer_folder.CLASS_OF_MODEL}
    assert registered == tokenizer_folder.CLASS_OF_MODEL
    overruled = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & registered.keys()
    assert overruled == set(tokenizer_folder.OVERRULED)


def word_piece():
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "hello", "world", "##ly", "a"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


@pytest.mark.parametrize(
    ("name", "make"), [("BertTokenizer", word_piece), ("CohereTokenizer", byte_level), ("NoSuchTokenizer", byte_level)]
)
def test_transformers_reads_folders_of_other_classes(tmp_path, name, make):
    folder = write(tmp_path, make(), tokenizer_class=name, bos_token=None, eos_token=None)
    require_equal(Tokenizer.load(folder), by_transformers(folder), ["hello world", "HELLO worldly", "hello\tworld 12"])


def test_a_vocabulary_and_its_merges(tmp_path):
    model = json.loads(byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>"}))
    ours = Tokenizer.load(tmp_path)
    assert [ours.decode(ours.encode(text)) for text in TEXT] == TEXT
    require_equal(ours, by_transformers(tmp_path), TEXT)


def test_a_sentencepiece_model_alone(tmp_path):
    """As the first folders of Llama and Mistral have it; the oracle is sentencepiece itself."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 20), model_writer=model, vocab_size=330, model_type="bpe", byte_fallback=True,
        character_coverage=0.99, hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}')
    ours = Tokenizer.load(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in [*TEXT, "zzz é 🙂"]:
        assert ours.encode(text) == [theirs.bos_id(), *theirs.encode(text)]
        assert ours.decode(ours.encode(text)) == text
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_id(), theirs.eos_id())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)),
            "is a file of tiktoken, .*pip install tiktoken",
        ),
        (b"\x00\x01 no model", "is no SentencePiece model.*download the file again"),
    ],
)
def test_a_model_that_cannot_be_read_names_what_is_missing(tmp_path, content, message):
    """transformers asks for tiktoken in both cases."""
    assert find_spec("tiktoken") is None, "tiktoken is no dependency; with it, the first folder is read"
    (tmp_path / "tokenizer.model").write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=message) as error:
        Tokenizer.load(tmp_path)
    assert ("pip install tiktoken" in str(error.value)) == ("tiktoken" in message)
