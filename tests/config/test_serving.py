# SPDX-License-Identifier: Apache-2.0
"""The API keys, from the option or from a file, which are in no error; and the origins."""

from __future__ import annotations

import pytest

from phalanx.config.serving import ServeOptions
from phalanx.config.sources import build_options, client_api_key, read_sources
from phalanx.errors import OptionError


def test_api_key_from_a_file(tmp_path):
    file = tmp_path / "key"
    file.write_text("hunter2\n")
    assert ServeOptions.of(api_key_file=str(file)).read_api_keys() == ["hunter2"]
    assert ServeOptions.of(api_key="hunter3").read_api_keys() == ["hunter3"]
    assert ServeOptions.of().read_api_keys() == []
    raw_options = read_sources({}, environ={"PHALANX_API_KEY_FILE": str(file)})
    assert build_options(ServeOptions, raw_options).read_api_keys() == ["hunter2"]


@pytest.mark.parametrize("content", ["", "\n \n", None], ids=["empty", "blank", "none"])
def test_file_without_a_key(tmp_path, content):
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    with pytest.raises(OptionError, match="api_key_file") as error:
        ServeOptions.of(api_key_file=str(file)).read_api_keys()
    assert "hunter" not in str(error.value)


def test_two_keys(tmp_path):
    with pytest.raises(OptionError, match="exclude each other"):
        ServeOptions.of(api_key="hunter2", api_key_file=str(tmp_path)).read_api_keys()


def test_several_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("hunter2\n\n hunter3 \n")
    assert ServeOptions.of(api_key_file=str(file)).read_api_keys() == ["hunter2", "hunter3"]
    assert ServeOptions.of(api_key="hunter2, hunter3,").read_api_keys() == ["hunter2", "hunter3"]
    with pytest.raises(OptionError, match="api_key is not valid"):
        ServeOptions.of(api_key=" ,").read_api_keys()


def test_key_of_a_client(tmp_path):
    file = tmp_path / "keys"
    file.write_text("hunter2\nhunter3\n")
    assert client_api_key({"PHALANX_API_KEY": "hunter1,hunter2"}) == "hunter1"
    assert client_api_key({"PHALANX_API_KEY_FILE": str(file)}) == "hunter2"
    assert client_api_key({"PHALANX_API_KEY": ""}) is None


def test_origins():
    assert ServeOptions.of(cors_origins="https://a.org, http://localhost:3000").read_cors_origins() == [
        "https://a.org", "http://localhost:3000",
    ]  # fmt: skip
    assert ServeOptions.of(cors_origins="*").read_cors_origins() == ["*"]
    for wrong in ("a.org", "https://a.org/", "https://a.org/x"):
        with pytest.raises(OptionError, match="is not an origin"):
            ServeOptions.of(cors_origins=wrong)


@pytest.mark.parametrize(("text", "modules"), [
    ("sql=/a/sql", {"sql": "/a/sql"}), ("a=/x,b=y=z", {"a": "/x", "b": "y=z"}), ("a=/x b=/y", {"a": "/x", "b": "/y"}),
    ('{"name": "a", "path": "/x", "base_model_name": "m"}', {"a": "/x"}),
    ('{"name": "a", "path": "/x"},{"name": "b", "path": "/y z"}', {"a": "/x", "b": "/y z"}), (None, {}),
    ('a=/x,{"name": "b", "path": "/y z"} c=/z', {"a": "/x", "b": "/y z", "c": "/z"}),
    ('[{"name": "a", "path": "/x"}]', {"a": "/x"}),
])  # fmt: skip
def test_adapters_by_their_names(text, modules):
    assert ServeOptions.of(lora_modules=text).read_lora_modules() == modules


@pytest.mark.parametrize(
    "text",
    ["sql", "=x", "a=", "a=/x a=/y", '{"name": "a"}', '{"name": "a", "path": "/x", "more": 1}', "{", '{"name": "a", "path": 5}'],
)
def test_adapters_without_name_or_folder_are_refused(text):
    with pytest.raises(OptionError, match="lora_modules=") as refused:
        ServeOptions.of(lora_modules=text)
    assert "Value error" not in refused.value.why
