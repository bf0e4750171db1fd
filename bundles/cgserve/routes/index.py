"""The answer to GET /: the models of a server, and its paths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..language.completion_response import PATHS
from ..models.version import Version
from .texts import PATHS as TEXT_PATHS

PLAIN = ("GET /health", "GET /metrics", "GET /v2", "POST /v2/repository/index", "GET /v1/models")
"""Paths that belong to no model."""


HELP = "examples of requests: cli/docs/serving.md; for a model of tensors, GET /v2/models/MODEL shows inputs and outputs"


def index(serving: Iterable[Version], refused: Mapping[str, str]) -> dict[str, Any]:
    """Returns the answer to GET /.  `refused`: why a version does not serve, by model and version."""
    versions = sorted(serving, key=lambda version: version.model)
    answer: dict[str, Any] = {"server": "cgcompile serve", "models": {}}
    for version in versions:
        answer["models"] |= {name: paths_of(version, name) for name in version.names}
    if refused:
        answer["refused"] = dict(refused)
    return answer | {"paths": list(PLAIN), "help": HELP}


def paths_of(version: Version, name: str) -> list[str]:
    """Returns methods and paths that a model answers at."""
    if version.language is not None:
        return [f"POST {path}" for path in (*PATHS, "/tokenize", "/detokenize")]
    tensors = [f"GET /v2/models/{name}", f"POST /v2/models/{name}/infer"]
    return [f"POST /v1{TEXT_PATHS[version.text.task]}", *tensors] if version.text is not None else tensors
