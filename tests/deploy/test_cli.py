# SPDX-License-Identifier: Apache-2.0
"""`phalanx deploy`: serve's flags and the manifest's own, to stdout or a folder; errors are one line."""

from __future__ import annotations

import pytest
import yaml

from phalanx.cli import main
from phalanx.deploy import folder
from phalanx.deploy.options import K8sOptions

IMAGE = ("--image", "registry.example/phalanx:1")


def test_flags_of_serve_and_of_the_manifest(capsys):
    words = ["--tp_size", "8", "--pp-size", "2", "--num_workers", "2", "--dtype", "fp8", "--no_cuda_graphs", "--pod_replicas", "3"]
    words += ["--service_monitor", "--open_metrics", "--no_network_policy", "--env", "A=1", "--env", "B=2"]
    words += ["--api-key-secret", "key"]
    assert main(["deploy", "k8s", "meta-llama/Meta-Llama-3-70B", *IMAGE, *words]) == 0
    objects = {one["kind"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}
    group = objects["LeaderWorkerSet"]["spec"]
    pod = group["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    (container,) = pod["containers"]
    assert {"--tensor_parallel_size=8", "--pipeline_parallel_size=2", "--nnodes=2", "--dtype=fp8"} <= set(container["args"])
    assert "--no_cuda_graphs" in container["args"]
    assert group["replicas"] == 3
    assert "ServiceMonitor" in objects
    assert "NetworkPolicy" not in objects
    assert {("A", "1"), ("B", "2")} <= {(variable["name"], variable.get("value")) for variable in container["env"]}
    assert "key" in [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]


def test_the_guides_example_is_complete(capsys):
    """One replica, one container, four GPUs: with the selector, Service, shared memory and probes that it lacks."""
    assert main(["deploy", "k8s", "meta-llama/Meta-Llama-3-70B", *IMAGE, "--tp_size=4", "--max_batch_size=256"]) == 0
    objects = {one["kind"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}
    assert {"Deployment", "Service"} <= objects.keys()
    assert objects["Deployment"]["spec"]["replicas"] == 1
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert {"--tensor_parallel_size=4"} <= set(container["args"])  # 256 is the default of max_batch_size


def test_a_folder_of_files(tmp_path, capsys):
    words = ["deploy", "k8s", "demo", *IMAGE, "--pp_size", "2", "--num_workers", "2", "--device", "cpu"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert main([*words, "--out", str(tmp_path / "new" / "folder")]) == 0
    files = [line.rpartition("/")[2] for line in capsys.readouterr().out.split()]
    assert files[0] == "kustomization.yaml"
    assert len(set(files)) == len(files)
    assert yaml.safe_load((tmp_path / "new" / "folder" / "kustomization.yaml").read_text())["resources"] == files[1:]
    written = [yaml.safe_load((tmp_path / "new" / "folder" / name).read_text()) for name in files[1:]]
    assert written == list(yaml.safe_load_all(text))


def test_a_file_of_options(tmp_path, capsys):
    (tmp_path / "options.yaml").write_text("model: demo\ntp_size: 2\nmetrics_prefix: vllm\n")
    assert main(["deploy", "k8s", "--config", str(tmp_path / "options.yaml"), *IMAGE, "--endpoint_picker", "picker"]) == 0
    objects = {one["kind"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert "--tensor_parallel_size=2" in container["args"]
    assert objects["InferencePool"]["spec"]["endpointPickerRef"]["name"] == "picker"


def test_compose(tmp_path, capsys):
    assert main(["deploy", "compose", "demo", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert main(["deploy", "compose", "demo", "--device", "cpu", "--out", str(tmp_path / "here")]) == 0
    assert (tmp_path / "here" / "compose.yaml").read_text() == text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["k8s", "demo", *IMAGE, "--with", "dask"], "with='dask'"),
        (["k8s", "demo", *IMAGE, "--tp_size", "3", "--nnodes", "2"], "cannot be spread evenly"),
        (["k8s", "demo", *IMAGE, "--memory", "a"], "must be a quantity"),
        (["k8s", *IMAGE], "option model is missing"),
        (["k8s", "demo"], "option image is missing; it has no default; give --image: Container image that the nodes can pull"),
        (["k8s", "demo", *IMAGE, "--nmae", "x"], "flag --nmae is unknown; did you mean --name?"),
        (["compose", "demo", "--num_workers", "2", "--pp_size", "2"], "describes one host"),
        (["k8s", "demo", *IMAGE, "--out", "/dev/null/x"], "cannot be written"),
        (["compose", "demo", "--out", "/dev/null/x"], "cannot be written"),
    ],
)
def test_errors_are_one_line(words, problem, capsys):
    assert main(["deploy", *words]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_secrets_of_the_environment_are_refused_and_not_shown(monkeypatch, capsys):
    monkeypatch.setenv("PHALANX_API_KEY", "hidden-value")
    assert main(["deploy", "k8s", "demo", *IMAGE]) == 2
    output = capsys.readouterr()
    assert "api_key cannot be an option of a manifest" in output.err
    assert "hidden-value" not in output.err + output.out


def test_every_flag_has_a_help(capsys):
    for verb in ("k8s", "compose"):
        assert main(["deploy", verb, "--help"]) == 0
    for name, field in K8sOptions.model_fields.items():
        assert field.description, name


def test_names_of_files_differ(capsys):
    engine = ["deploy", "k8s", "demo", *IMAGE, "--pp_size", "2", "--num_workers", "2", "--pod_replicas", "2"]
    assert main(engine) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    names = [folder.file_name(document) for document in documents]
    assert len(set(names)) == len(documents)
    assert "network-policy-demo-api.yaml" in names
