# SPDX-License-Identifier: Apache-2.0
"""The name of a model that was given no name: its Hub id, or its folder's name, and never a path of the host."""

from __future__ import annotations

import pytest

from phalanx.serve.app import public_name
from tests.support.serve_http_app import Scripted, live

CACHE = "hub/models--org--my-model/snapshots/0a1b2c"


@pytest.mark.parametrize(
    ("folder", "name"), [("disk/my-model", "my-model"), (CACHE, "org/my-model"), (f"{CACHE}/int4", "org/my-model")]
)
def test_folders(tmp_path, monkeypatch, folder, name):
    path = tmp_path / folder
    path.mkdir(parents=True)
    (tmp_path / "link").symlink_to(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(path)
    for model in (str(path), f"{path}/", f"{path}/../{path.name}", str(tmp_path / "link"), f"~/{folder}", "."):
        assert public_name(model) == name, model


@pytest.mark.parametrize("model", ["demo", "org/model", "org/model@main"])
def test_what_is_no_folder_is_its_own_name(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    assert public_name(model) == model


@pytest.mark.parametrize(("folder", "name"), [("disk/my-model", "my-model"), (CACHE, "org/my-model")])
def test_no_answer_shows_a_path(tmp_path, folder, name):
    path = tmp_path / folder
    path.mkdir(parents=True)
    with live(Scripted("x"), model=str(path), served_model_name=None) as server, server.client() as http:
        card = http.get("/v1/models").json()["data"][0]
        assert (card["id"], card["root"]) == (name, name)
        answers = [http.get(f"/v1/models/{model}") for model in (name, str(path))]
        assert [answer.json() for answer in answers] == [card, card]
        ask = {"prompt": "x", "max_tokens": 1}
        for model in (name, str(path)):
            answer = http.post("/v1/completions", json={**ask, "model": model})
            assert answer.json()["model"] == name
            answers.append(answer)
        answers.append(http.post("/v1/completions", json={**ask, "model": "other"}))
        assert name in answers[-1].json()["error"]["message"]
        answers += [http.get(route) for route in ("/v1/models", "/metrics", "/openapi.json", "/ready", "/version", "/nowhere")]
        assert [answer.request.url for answer in answers if str(tmp_path) in answer.text] == []
