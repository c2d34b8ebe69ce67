# SPDX-License-Identifier: Apache-2.0
"""Special tokens as single characters, from the vocabulary to the parser and back."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from phalanx.config import SamplingParams
from phalanx.serve.detokenize import Detokenizer
from phalanx.serve.output_parsing import Markers
from phalanx.serve.tokenizer import Tokenizer
from tests.support.serve_small_tokenizers import byte_level, sentencepiece, write


@pytest.fixture(params=[byte_level, sentencepiece])
def tokenizer(request, tmp_path):
    backend = request.param()
    backend.add_special_tokens(
        [AddedToken("[A]", special=True, normalized=False), AddedToken("[AB]", special=True, normalized=False)]
    )
    backend.add_tokens([AddedToken("<plain>", special=False, normalized=False)])
    return Tokenizer.load(write(tmp_path, backend))


def test_only_special_tokens_are_replaced(tokenizer):
    markers = Markers.of(tokenizer, ["[A]", "[AB]", "<plain>", "[none]"])
    assert set(markers.special) == {"[A]", "[AB]"}
    encoded = markers.encode("x[AB]y[A]<plain>[none]")
    assert len(encoded) == len("xy<plain>[none]") + 2
    assert markers.decode(encoded) == "x[AB]y[A]<plain>[none]"
    assert markers.remove(encoded) == "xy<plain>[none]"
    assert markers.formats("x[A]y") == [
        {"type": "const_string", "value": "x"}, {"type": "token", "token": tokenizer.backend.token_to_id("[A]")},
        {"type": "const_string", "value": "y"},
    ]  # fmt: skip


@pytest.mark.parametrize("stop", [None, "yz"])
@pytest.mark.parametrize("skip", [True, False])
def test_the_detokenizer_shows_markers(tokenizer, skip, stop):
    markers = Markers.of(tokenizer, ["[A]"])
    token = tokenizer.backend.token_to_id
    letters = tokenizer.encode("hello world 🙂", add_special_tokens=False)
    ids = [*letters, token("[A]"), token("[AB]"), *letters, *tokenizer.encode("[A", add_special_tokens=False)]
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip, stop=stop), shown=markers.shown)
    text = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish()
    plain = tokenizer.decode(ids, skip_special_tokens=skip)
    assert markers.remove(text) == plain.replace("[A]", "")
    assert text.count(markers.encode("[A]")) == 1
    assert text.index(markers.encode("[A]")) == len("hello world 🙂")


def test_no_other_token_makes_a_marker(tokenizer):
    markers = Markers.of(tokenizer, ["[A]"])
    character = markers.encode("[A]")
    ids = tokenizer.encode(f"a{character}b", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, SamplingParams(), shown=markers.shown)
    assert detokenizer.push(ids) + detokenizer.finish() == "a\ufffdb"
    assert Detokenizer(tokenizer, SamplingParams()).push(ids) == f"a{character}b"
