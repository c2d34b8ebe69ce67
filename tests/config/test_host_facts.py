# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import platform

from phalanx.config.host_facts import differences, host_facts
from phalanx.config.locate import DEMO
from phalanx.config.options import EngineOptions
from phalanx.version import __version__


def facts(folder=DEMO, **options):
    return host_facts(EngineOptions(model=str(folder), **options), folder)


def test_the_facts_of_a_host_are_its_software_options_and_checkpoint(tmp_path):
    here = facts()
    assert (here["phalanx version"], here["Python version"]) == (__version__, platform.python_version())
    assert here["torch version"][0].isdigit()
    assert differences(here, facts(node_rank=1, nnodes=2)) == {"option nnodes": ("1", "2")}
    assert differences(here, facts(start_timeout=900.0, master_addr_timeout=60.0)) == {}, "a host may wait longer for the others"
    assert differences(here, facts(max_seq_len=64)) == {"option max_seq_len": ("null", "64")}
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    assert differences(here, facts(tmp_path)) == {}
    (tmp_path / "model.safetensors").write_bytes(b"another")
    assert list(differences(here, facts(tmp_path))) == ["checkpoint"]
    assert differences(here, facts(tmp_path, load_format="dummy")).keys() == {"checkpoint", "option load_format"}


def test_a_secret_is_no_fact():
    assert not any("a secret of sixteen bytes" in value for value in facts(cluster_token="a secret of sixteen bytes").values())


def test_an_absent_fact_differs():
    assert differences({"a": "1"}, {"b": "2"}) == {"a": ("1", "nothing"), "b": ("nothing", "2")}
