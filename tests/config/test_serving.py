# SPDX-License-Identifier: Apache-2.0
"""The API key: from the option, or from a file; it is in no error."""

from __future__ import annotations

import pytest

from phalanx.config.serving import ServeOptions
from phalanx.config.sources import build_options, read_sources
from phalanx.errors import OptionError


def test_api_key_from_a_file(tmp_path):
    file = tmp_path / "key"
    file.write_text("hunter2\n")
    assert ServeOptions.of(api_key_file=str(file)).read_api_key() == "hunter2"
    assert ServeOptions.of(api_key="hunter3").read_api_key() == "hunter3"
    assert ServeOptions.of().read_api_key() is None
    raw_options = read_sources({}, environ={"PHALANX_API_KEY_FILE": str(file)})
    assert build_options(ServeOptions, raw_options).read_api_key() == "hunter2"


@pytest.mark.parametrize("content", ["", "\n", "hunter2\nhunter3\n", None], ids=["empty", "blank", "two", "none"])
def test_file_without_a_key(tmp_path, content):
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    with pytest.raises(OptionError, match="api_key_file") as error:
        ServeOptions.of(api_key_file=str(file)).read_api_key()
    assert "hunter" not in str(error.value)


def test_two_keys(tmp_path):
    with pytest.raises(OptionError, match="exclude each other"):
        ServeOptions.of(api_key="hunter2", api_key_file=str(tmp_path)).read_api_key()
