# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from phalanx import cli
from phalanx.config.cluster_token import read_cluster_token
from phalanx.config.options import EngineOptions
from phalanx.config.sources import build_options, read_sources
from phalanx.errors import OptionError

TOKEN = "0123456789abcdef-of-a-test"


def options(**values: Any) -> EngineOptions:
    return EngineOptions(model="x", **values)


def test_several_nodes_need_a_token_or_say_that_they_are_insecure() -> None:
    assert read_cluster_token(options()) is None
    with pytest.raises(OptionError, match=r"^nnodes=2 needs a cluster token; .*PHALANX_CLUSTER_TOKEN.*--insecure_cluster"):
        read_cluster_token(options(nnodes=2))
    assert read_cluster_token(options(nnodes=2, insecure_cluster=True)) is None
    assert read_cluster_token(options(nnodes=2, cluster_token=TOKEN)) == TOKEN


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    assert read_cluster_token(options(nnodes=2, cluster_token_file=str(path))) == TOKEN
    raw_options = read_sources({"model": "x"}, environ={"PHALANX_CLUSTER_TOKEN": TOKEN})
    assert read_cluster_token(build_options(EngineOptions, raw_options)) == TOKEN


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cluster_token": "too short"}, "cluster_token is too short"),
        ({"cluster_token": " " * 30}, "cluster_token is too short"),
        ({"cluster_token": TOKEN, "insecure_cluster": True}, "exclude each other"),
        ({"cluster_token": TOKEN, "cluster_token_file": "x"}, "exclude each other"),
        ({"cluster_token_file": "no such file"}, "'no such file' cannot be read; No such file"),
    ],
)
def test_what_is_no_token(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        read_cluster_token(options(nnodes=2, **values))
    assert "too short;" in str(caught.value) or str(values.get("cluster_token")) not in str(caught.value)


def test_no_error_and_no_representation_shows_the_token() -> None:
    assert TOKEN not in repr(options(cluster_token=TOKEN))
    with pytest.raises(ValidationError) as caught:
        EngineOptions(model="x", cluster_token=[TOKEN])  # type: ignore[arg-type]
    assert TOKEN not in str(caught.value)
    with pytest.raises(OptionError, match="cluster_token is not valid") as refused:
        EngineOptions.of(model="x", cluster_token=[TOKEN])
    assert TOKEN not in str(refused.value)


def test_a_token_in_the_command_line_is_warned_of(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    import phalanx.serve.app

    monkeypatch.setattr(phalanx.serve.app, "run", lambda *_: 0)
    assert cli.main(["serve", "demo", "--cluster_token", TOKEN]) == 0
    log = capfd.readouterr().err
    assert "--cluster_token stands in the process list" in log
    assert TOKEN not in log
    monkeypatch.setenv("PHALANX_CLUSTER_TOKEN", TOKEN)
    assert cli.main(["serve", "demo"]) == 0
    assert "process list" not in capfd.readouterr().err
