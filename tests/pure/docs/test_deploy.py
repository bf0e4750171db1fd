"""Images and manifests in examples/deploy name existing options, routes, ports and metrics. Needs no engine and no cluster."""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import pytest

from tests.helpers.places import ROOT

DEPLOY = ROOT / "examples/deploy"
IMAGES = ("cpu.Dockerfile", "gpu.Dockerfile")
yaml = pytest.importorskip("yaml", reason="pip install '.[examples]'")


def behind(image: str, name: str) -> list[str]:
    """Returns the arguments of every instruction `name` of an image."""
    lines = (DEPLOY / image).read_text(encoding="utf-8").splitlines()
    return [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == name]


def manifests() -> dict[str, Any]:
    return {resource["kind"]: resource for resource in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))}


def options(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def known_options() -> set[str]:
    typer = pytest.importorskip("typer")
    serve = importlib.import_module("cgcompile_cli.commands.serve").serve
    app = typer.Typer()
    app.command()(serve)
    return {name for parameter in typer.main.get_command(app).params for name in parameter.opts}


def routes() -> set[str]:
    for package in ("starlette", "uvicorn", "prometheus_client", "tokenizers"):
        pytest.importorskip(package, reason="pip install '.[serve]'")
    application = importlib.import_module("cgserve.application").Application(
        dict, importlib.import_module("cgserve.settings").Settings(), lambda event: None
    )
    return {route.path for part in application._parts() for route in part.routes}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_starts_the_server_as_another_user(image: str) -> None:
    command, models = json.loads(behind(image, "ENTRYPOINT")[0]), json.loads(behind(image, "CMD")[0])
    assert command[:2] == ["cgcompile", "serve"] and options(command) <= known_options() and models == behind(image, "VOLUME")
    ports = [command[command.index(name) + 1] for name in ("--port", "--grpc-port")]
    assert behind(image, "EXPOSE") == [" ".join(ports)] and command[command.index("--host") + 1] == "0.0.0.0"
    (path,) = re.findall(rf"localhost:{ports[0]}(/[\w/]+)", behind(image, "HEALTHCHECK")[0])
    assert path in routes() and any("useradd --system --uid 10001" in step for step in behind(image, "RUN"))
    assert behind(image, "USER") == ["10001"]


def test_the_images_differ_in_what_a_gpu_needs() -> None:
    cpu, gpu = ["\n".join(behind(image, "RUN")) for image in IMAGES]
    assert "libgomp1" in cpu and "libgomp1" not in gpu and "torch" not in cpu + gpu
    assert "NVIDIA_DRIVER_CAPABILITIES=compute" in behind("gpu.Dockerfile", "ENV")[0]
    assert [line for line in gpu.splitlines() if "pip" in line] == [line for line in cpu.splitlines() if "pip" in line]


def test_the_pods_are_those_of_the_image_and_are_probed() -> None:
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert options(container["args"]) <= known_options() and container["args"][0] == behind("cpu.Dockerfile", "VOLUME")[0]
    assert [str(port["containerPort"]) for port in container["ports"]] == behind("cpu.Dockerfile", "EXPOSE")[0].split()
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert [probe["path"] for probe in probes] == ["/v2/health/ready", "/v2/health/ready", "/v2/health/live"]
    assert {probe["path"] for probe in probes} <= routes() and {probe["port"] for probe in probes} == {"http"}
    names = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in manifests()["Service"]["spec"]["ports"]} == names
    labels = manifests()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget"):
        selector = manifests()[kind]["spec"]["selector"]
        assert selector.get("matchLabels", selector) == labels


def test_the_autoscaler_reads_metrics_that_the_server_has() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus-adapter.yaml").read_text(encoding="utf-8"))["rules"]["custom"]
    asked = {metric["pods"]["metric"]["name"] for metric in manifests()["HorizontalPodAutoscaler"]["spec"]["metrics"]}
    assert asked == {rule["name"]["as"] for rule in rules}
    pytest.importorskip("prometheus_client", reason="pip install '.[serve]'")
    counters = importlib.import_module("cgserve.application").Counters()
    counters.language("m")
    there = {f"{metric.name}{end}" for metric in counters.registry.collect() for end in ("_sum", "_count")}
    for rule in rules:
        named = set(re.findall(r"(cgbundle_\w+)\{", rule["metricsQuery"] + rule["seriesQuery"]))
        assert len(named) == 2 and named <= there
