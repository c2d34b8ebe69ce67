# SPDX-License-Identifier: Apache-2.0
"""Shapes have the published numbers of parameters, and a tokenizer that gives each id a text."""

from __future__ import annotations

import math
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.bench import shapes
from phalanx.config.model import ModelShape
from phalanx.errors import OptionError
from phalanx.layout.families.registry import short_names
from phalanx.layout.weight_tensors import tensors
from phalanx.serve.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama-3-8b", 8_030_261_248), ("llama-3-70b", 70_553_706_496), ("llama-3.1-405b", 405_853_388_800)]
)
def test_published_parameters(name, parameters):
    shape = ModelShape.from_config(shapes.SHAPES[name])
    assert sum(math.prod(dims) for dims in tensors(shape).values()) == parameters
    assert (shape.num_kv_heads, shape.head_dim, shape.dtype) == (8, 128, "bf16")


def test_a_folder_that_lives_as_long_as_it_is_needed():
    with shapes.folder_of("llama-3-8b") as folder:
        assert ModelShape.from_folder(Path(folder)).num_layers == 32
    assert not Path(folder).exists()
    with shapes.folder_of("demo") as folder:
        assert folder == "demo"


def test_a_shape_cut_to_its_first_layers():
    with shapes.folder_of("deepseek-v3:5") as folder:
        cut, full = ModelShape.from_folder(Path(folder)), ModelShape.from_config(shapes.SHAPES["deepseek-v3"])
        assert (cut.num_layers, full.num_layers) == (5, 61)
        layers = {name.split(".")[2] for name in tensors(cut) if name.startswith("model.layers.")}
        assert layers == {"0", "1", "2", "3", "4"}
        assert {"model.embed_tokens.weight", "lm_head.weight"} < tensors(cut).keys()
    for layers in ("0", "62", "x", "-1", ""):
        with pytest.raises(OptionError, match=r"is no number of layers of deepseek-v3; use deepseek-v3:1 to deepseek-v3:61"):
            shapes.write(f"deepseek-v3:{layers}", Path("unused"))


def test_every_known_model_is_a_shape():
    assert shapes.SHAPES.keys() == set(short_names()) > {"qwen3-next-80b-a3b", "glm-4.5-air"}
    wrapper = shapes.config_of("mistral-small-3.1-24b:3")
    assert "text_config" in wrapper
    for name in shapes.SHAPES:
        assert ModelShape.from_config(shapes.config_of(f"{name}:2")).num_layers == 2


def test_every_id_has_a_text(tmp_path):
    tokenizer = Tokenizer.load(shapes.write("llama-3-8b", tmp_path / "new"))
    assert tokenizer.vocab_size == 128256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (128000, 128001)
    assert tokenizer.decode(tokenizer.encode("A rank? 世界")) == "A rank? 世界"
    texts = {tokenizer.decode([token], skip_special_tokens=False) for token in range(256, 128256)}
    assert len(texts) == 128256 - 256
    assert "" not in texts


def test_what_is_there_stays(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OptionError, match=r"a config.json is there"):
        shapes.write("llama-3-8b", tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"
    (tmp_path / "config.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(OptionError, match=r"a tokenizer.json is there; name a new folder"):
        shapes.write("llama-3-8b", tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    with pytest.raises(OptionError, match=r"'llama-4' is unknown; use one of llama-3-8b, "):
        shapes.write("llama-4", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "plain").write_text("x")
    with pytest.raises(OptionError, match=r"cannot be written to .*plain; its folder is a file; name a new folder"):
        shapes.write("llama-3-8b", tmp_path / "plain")
    with pytest.raises(OptionError, match=r"cannot be written to /proc/x; No such file or directory; name a new folder"):
        shapes.write("llama-3-8b", Path("/proc/x"))


def test_half_a_shape_is_none(tmp_path):
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # config.json is smaller, tokenizer.json larger
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    command = [sys.executable, "-m", "phalanx", "bench", "shape", "llama-3-8b", str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limited)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "File too large" in done.stderr
    assert not list((tmp_path / "new").iterdir())
