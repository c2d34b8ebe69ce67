# SPDX-License-Identifier: Apache-2.0
"""Options of manifests drawn at random: valid ones, of every kind."""

from __future__ import annotations

import random
from typing import Any, get_args

from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import ALIASES
from phalanx.deploy.k8s import SCRAPERS
from phalanx.deploy.options import K8sOptions
from phalanx.deploy.serve_flags import ServeFlags

_SIZES = set(ALIASES.values()) | {"master_port", "cluster_token", "cluster_token_file", "insecure_cluster"}
_NOT_DRAWN = _SIZES | {
    "model", "plan", "node_rank", "master_addr", "master_addr_timeout", "launcher", "kernel_cache_dir", "device", "tokenizer",
    "skip_tokenizer_init", "start_timeout", "host", "port",
    "api_key", "api_key_file", "chat_template", "metrics_prefix", "shutdown_timeout",
}  # fmt: skip
"""Options that are drawn together below, or that a manifest refuses."""
TEXTS = (
    "plain",
    "with space",
    "$HOME $(date) $$",
    "quote \" and ' and \\",
    "y",
    "08",
    "1e5",
    "on",
    "line\nbreak",
    "trailing\n",
    "日本",
    "--x=1",
    "{% if x %}",
)

_FORMS = {
    "cors_origins": ("*", "https://app.example", "http://a.example:8080, https://b.example"),
    "speculative_config": ('{"method": "ngram", "num_speculative_tokens": 4}',),
    "lora_modules": ("sql=/adapters/sql", "a=/adapters/a b=/adapters/b"),
}
"""Of texts that must have a form."""


def serve_flags(draw: random.Random, *, model: str, folder: bool, ray: bool) -> ServeFlags:
    """A server's options: a few of them away from their defaults."""
    tp, pp, nodes = draw.choice([(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (4, 2, 1), (8, 2, 2), (4, 4, 4), (1, 2, 2)])
    engine: dict[str, Any] = {"model": model, "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "nnodes": nodes}
    engine |= {
        "device": draw.choice(["auto", "cuda", "cpu"]),
        "start_timeout": 600.0 if ray else draw.choice([600.0, 30.5, 1200.0]),
    }
    if nodes > 1:
        engine |= {"insecure_cluster": draw.random() < 0.2 and not ray, "master_port": draw.choice([29400, 31000])}
    if draw.random() < 0.2:
        engine["tokenizer"] = draw.choice(["org/tokenizer", "tokenizer", *(["/models/a/tokenizer"] if folder else [])])
    serving: dict[str, Any] = {
        "port": draw.choice([8000, 8080, 1024]), "metrics_prefix": draw.choice(["phalanx", "vllm"]),
        "shutdown_timeout": draw.choice([30.0, 0.0, 7.25, 600.0]),
    }  # fmt: skip
    if draw.random() < 0.2:
        serving["chat_template"] = draw.choice(["{{ messages }}", "{% for m in messages %}\n$$x\n{% endfor %}"])
    for values, options in ((engine, EngineOptions), (serving, ServeOptions)):
        drawn = [name for name in options.model_fields if name not in _NOT_DRAWN]
        for name in draw.sample(drawn, draw.randint(0, min(len(drawn), 4))):
            values[name] = draw.choice(_FORMS[name]) if name in _FORMS else _value(draw, options.model_fields[name])
    if nodes > 1:
        engine.pop("replicas", None)  # an error, which a test of its own expects
    return ServeFlags(EngineOptions.of(**engine), ServeOptions.of(**serving))


def _value(draw: random.Random, field: Any) -> Any:
    """A value that the field's type takes."""
    types = get_args(field.annotation) or (field.annotation,)
    choices = [each for each in types if isinstance(each, str)]
    if choices:
        return draw.choice(choices)
    if bool in types:
        return draw.random() < 0.5
    if int in types:
        return draw.randint(2, 200)
    if float in types:
        return draw.choice([0.5, 0.1 + 0.2, 1.0])
    return draw.choice(TEXTS)


def deployment(seed: int) -> tuple[ServeFlags, K8sOptions]:
    """The options of the manifest of a seed."""
    draw = random.Random(seed)
    source = draw.choice(["hub", "hub", "claim", "host"])
    model = (
        draw.choice(["demo", "meta-llama/Meta-Llama-3-70B", "org/Unknown_1.5"]) if source == "hub" else draw.choice(["a/b", "70b"])
    )
    ray = draw.random() < 0.15
    flags = serve_flags(draw, model=model, folder=source != "hub", ray=ray)
    nodes, gpu = flags.engine.nnodes, flags.engine.device != "cpu"
    values: dict[str, Any] = {"with_": "ray"} if ray else {}

    def maybe(name: str, *choices: Any, when: bool = True) -> None:
        if when and draw.random() < 0.35:
            values[name] = draw.choice(choices)

    maybe("name", "server", "a-1")
    maybe("namespace", "models", "prod")
    values["image"] = draw.choice(["phalanx:1", "registry.example/phalanx:1", "p@sha256:0a1b"])
    maybe("image_pull_secret", "pull")
    maybe("max_surge", 0, 2, when=not ray)
    maybe("cpu", "8", "500m")
    maybe("memory", "512Gi", "640.5Gi")
    maybe("shm_size", "2Gi", "512Mi", "100M")
    maybe("node_selector", ("gpu=h100",), ("example.com/pool=a.b", "zone="))
    maybe("runtime_class", "nvidia")
    maybe("exclusive_topology", "example.com/rack", when=nodes > 1 and not ray)
    maybe("env", ("NCCL_DEBUG=INFO",), ("A=", "B=x=y", *(f"T{index}={text}" for index, text in enumerate(TEXTS))))
    maybe("dra", True, when=gpu)
    maybe("gpu_resource", "nvidia.com/mig-3g.40gb", when=gpu and not values.get("dra"))
    maybe("device_class", "mig.nvidia.com", when=bool(values.get("dra")))
    if source != "hub":
        values["model_claim" if source == "claim" else "model_host_path"] = "models" if source == "claim" else "/data/models"
    if draw.random() < 0.5:
        values |= draw.choice([{"cache_claim": "cache"}, {"cache_host_path": "/var/cache/phalanx"}])
    maybe("hub_token_secret", "hub")
    maybe("api_key_secret", "key")
    maybe("cluster_token_secret", "token", when=nodes > 1 and not flags.engine.insecure_cluster and not ray)
    maybe("startup_seconds", 1200, 7200)
    for name in ("disruption_budget", "network_policy", "service_monitor"):
        maybe(name, True, False, when=name != "service_monitor" or not ray)
    maybe("autoscale", "hpa", "keda", when=not ray)
    if scaled := values.get("autoscale"):
        maybe("min_replicas", 1, 2)
        maybe("max_replicas", 2, 6)
        maybe("queue_target", 1, 20)
        if scaled == "keda":
            values["prometheus_url"] = "http://prometheus.monitoring:9090"
    else:
        maybe("pod_replicas", 1, 3)
    maybe("endpoint_picker", "picker", when=flags.serving.metrics_prefix == "vllm" and not ray)
    maybe("endpoint_picker_port", 9002, 1234, when="endpoint_picker" in values)
    if "api_key_secret" in values and any(values.get(name) for name in SCRAPERS):
        flags = ServeFlags(flags.engine, flags.serving.model_copy(update={"open_metrics": True}))
    return flags, K8sOptions.of(**values)
