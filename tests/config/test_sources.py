# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import (
    Torchrun,
    adopt_variables,
    build_options,
    differing_variables,
    place_process,
    ray_address,
    read_sources,
    torchrun,
    variables_to_pass_on,
)
from phalanx.errors import LayoutError, OptionError, UnknownOption


def written(tmp_path, text):
    path = tmp_path / "options.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_then_environment_then_flags(tmp_path):
    path = written(tmp_path, "model: of-file\ntp_size: 2\nmax-batch-size: 3\nport: 1\nseed: 1\n")
    environ = {"PHALANX_MAX_BATCH_SIZE": "4", "PHALANX_PORT": "2", "PHALANX_SEED": "2", "HOME": "/"}
    raw_options = read_sources({"port": "3", "seed": None}, file=path, environ=environ)
    engine, serving = build_options(EngineOptions, raw_options), build_options(ServeOptions, raw_options)
    assert (engine.model, engine.tensor_parallel_size, engine.max_batch_size, engine.seed, serving.port) == ("of-file", 2, 4, 2, 3)
    assert raw_options.origins["port"] == "--port"
    assert raw_options.origins["seed"] == "PHALANX_SEED"
    assert str(path) in raw_options.origins["model"]


@pytest.mark.parametrize("flag", ["tensor_parallel_size", "tp_size", "tp-size", "tensor-parallel-size"])
def test_one_option_by_all_its_names(flag):
    assert read_sources({flag: 4}, environ={}).values == {"tensor_parallel_size": 4}


def test_num_workers_is_the_number_of_nodes():
    assert read_sources({"num_workers": 2}, environ={}).values == {"nnodes": 2}
    assert read_sources({}, environ={"PHALANX_NUM_WORKERS": "2"}).values == {"nnodes": "2"}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"PHALANX_TENSOR_PARALEL_SIZE": "2"},
            "PHALANX_TENSOR_PARALEL_SIZE is unknown; did you mean PHALANX_TENSOR_PARALLEL_SIZE",
        ),
        ({"PHALANX_PROT": "2"}, "did you mean PHALANX_PORT"),
        ({"PHALANX_TP_SIZE": "2", "PHALANX_TENSOR_PARALLEL_SIZE": "2"}, "both are one option"),
    ],
)
def test_unknown_or_double_variables(environ, message):
    with pytest.raises(OptionError, match=message):
        read_sources({}, environ=environ)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor_paralel_size: 2", "did you mean 'tensor_parallel_size'"),
        ("seed: 1\nseed: 2", "'seed' is given twice"),
        ("tp_size: 1\ntensor_parallel_size: 2", "both are one option"),
        ("- a\n- b", "is not a mapping; .*option: value"),
        ("3: 4", "option: value"),
        ("a: [", "while parsing"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_bad_files(tmp_path, text, message):
    with pytest.raises(OptionError, match=message):
        read_sources({}, file=written(tmp_path, text), environ={})


def test_an_empty_file_asks_for_nothing(tmp_path):
    assert read_sources({}, file=written(tmp_path, "# nothing\n"), environ={}).values == {}


def test_a_missing_file(tmp_path):
    with pytest.raises(OptionError, match=r"^the options file .*none\.yaml cannot be read; .*No such file"):
        read_sources({}, file=tmp_path / "none.yaml", environ={})


def test_unknown_flag():
    with pytest.raises(UnknownOption, match="did you mean 'tp_size'"):
        read_sources({"tp_siz": 2}, environ={})


def test_a_bad_value_names_its_source():
    with pytest.raises(OptionError, match=r"^port='abc' is not valid; it comes from PHALANX_PORT; it must be a valid integer"):
        build_options(ServeOptions, read_sources({}, environ={"PHALANX_PORT": "abc"}))
    with pytest.raises(OptionError, match=r"^option model is missing"):
        build_options(EngineOptions, read_sources({}, environ={}))


def test_a_key_is_never_shown():
    with pytest.raises(OptionError) as refused:
        build_options(ServeOptions, read_sources({"api_key": ["hunter2"]}, environ={}))
    assert "hunter2" not in str(refused.value)


def test_truth_values_of_the_environment():
    environ = {"PHALANX_MODEL": "m", "PHALANX_SKIP_TOKENIZER_INIT": "true", "PHALANX_CUDA_GRAPHS": "0"}
    raw_options = read_sources({}, environ=environ)
    engine = build_options(EngineOptions, raw_options)
    assert (engine.skip_tokenizer_init, engine.cuda_graphs) == (True, False)


def test_links_of_a_kubernetes_service_called_phalanx_are_not_options():
    links = {
        "PHALANX_SERVICE_HOST": "10.0.0.1", "PHALANX_SERVICE_PORT": "8000", "PHALANX_SERVICE_PORT_HTTP": "8000",
        "PHALANX_PORT": "tcp://10.0.0.1:8000", "PHALANX_PORT_8000_TCP": "tcp://10.0.0.1:8000", "PHALANX_PORT_8000_TCP_PROTO": "tcp",
        "PHALANX_PORT_8000_TCP_PORT": "8000", "PHALANX_PORT_8000_TCP_ADDR": "10.0.0.1",
    }  # fmt: skip
    assert read_sources({}, environ=links).values == {}


@pytest.mark.parametrize("service", ["api", "llama-3-8b", "master", "2", "service-port"])
def test_links_of_services_whose_names_begin_with_phalanx_are_not_options(service):
    """The variables of Kubernetes' documentation, for a Service with two named ports."""
    name = f"phalanx-{service}".upper().replace("-", "_")
    links = {f"{name}_SERVICE_HOST": "fd00::1", f"{name}_SERVICE_PORT": "8000", f"{name}_PORT": "tcp://[fd00::1]:8000"}
    links |= {f"{name}_SERVICE_PORT_HTTP_METRICS": "9090"}
    for port, protocol in ((8000, "tcp"), (9090, "udp"), (9, "sctp")):
        stem = f"{name}_PORT_{port}_{protocol.upper()}"
        links |= {stem: f"{protocol}://[fd00::1]:{port}", f"{stem}_PROTO": protocol, f"{stem}_PORT": str(port)}
        links |= {f"{stem}_ADDR": "fd00::1"}
    assert read_sources({}, environ={**links, "PHALANX_TP_SIZE": "2"}).values == {"tensor_parallel_size": "2"}


VARIABLES = {
    "PHALANX_MASTER_PORT": ("8001", "an option"), "PHALANX_TP_SIZE": ("2", "an option"), "PHALANX_api_key": ("k", "an option"),
    "PHALANX_MASTER_PORT_": ("tcp://a:1", "refused"), "PHALANX_API_PORT": ("8000", "refused"),
    "PHALANX_API_SERVICE_HOSTS": ("a", "refused"), "PHALANX_API_PORT_80_ICMP": ("a", "refused"), "PHALANX_": ("", "refused"),
    "PHALANX_SERVICE_HOST": ("a", "harmless"), "PHALANX_PORT": ("udp://a:1", "harmless"), "PHALANXES": ("a", "harmless"),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_is_an_option_harmless_or_refused_by_name(name):
    value, kind = VARIABLES[name]
    if kind == "refused":
        with pytest.raises(UnknownOption, match=rf"^environment variable {name.upper()} is unknown"):
            read_sources({}, environ={name: value})
    else:
        assert list(read_sources({}, environ={name: value}).values.values()) == [value] * (kind == "an option")


def test_torchrun():
    environ = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    environ |= {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    assert torchrun(environ) == Torchrun(3, 4, 1, "host0", 29500)
    assert torchrun({"RANK": "0", "WORLD_SIZE": "1"}) is None
    with pytest.raises(OptionError, match="torchrun is not a number"):
        torchrun(environ | {"RANK": "first"})
    options, gpu = place_process(EngineOptions.of(model="m", tensor_parallel_size=2, pipeline_parallel_size=2), environ)
    assert (options.nnodes, options.node_rank, options.master_addr, options.master_port, gpu) == (4, 3, "host0", 29501, 1)
    with pytest.raises(LayoutError, match=r"torchrun started 4 processes; the layout has 2 ranks"):
        place_process(EngineOptions.of(model="m", tensor_parallel_size=2), environ)
    alone = EngineOptions.of(model="m")
    assert place_process(alone, {}) == (alone, 0)


def test_ray_is_chosen_where_one_command_asks_for_several_hosts_of_a_cluster(tmp_path):
    def launcher(environ, **options):
        return place_process(EngineOptions.of(model="m", **options), environ)[0].launcher

    here = {"RAY_ADDRESS": "10.0.0.1:6379"}
    assert launcher(here, nnodes=2) == "ray"
    assert launcher(here) == "auto"
    assert launcher(here, nnodes=2, launcher="local") == "local"
    assert launcher(here, nnodes=2, node_rank=1) == "auto"
    assert launcher(here, nnodes=2, master_addr="host0") == "auto"
    assert launcher({"TMPDIR": str(tmp_path)}, nnodes=2) == "auto"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.7:6379")
    assert ray_address({"TMPDIR": str(tmp_path), "RAY_ADDRESS": "auto"}) == "10.0.0.7:6379"
    assert launcher({"TMPDIR": str(tmp_path)}, nnodes=2) == "ray"


def test_variables_that_ranks_on_other_hosts_get():
    environ = {
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "t",
        "PHALANX_API_KEY": "k",
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/bin",
        "HOME": "/",
    }
    assert variables_to_pass_on(environ) == {"NCCL_DEBUG": "INFO", "HF_TOKEN": "t"}
    there = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
    assert adopt_variables({"NCCL_DEBUG": "INFO", "HF_TOKEN": "t"}, there) == {"NCCL_DEBUG": "WARN"}
    assert there == {"NCCL_DEBUG": "WARN", "HF_TOKEN": "t"}  # what Ray set for its actor is gone
    assert adopt_variables({"OMP_NUM_THREADS": "8"}, there := {"OMP_NUM_THREADS": "1"}) == {}
    assert there == {"OMP_NUM_THREADS": "8"}


def test_variables_that_say_otherwise():
    assert differing_variables({"A": "1", "B": "2", "C": "3"}, {"A": "1", "B": "other", "D": "4"}) == {"B": "other"}
