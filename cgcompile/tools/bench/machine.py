"""Where a benchmark ran."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

from cgbundle.cpu.processor import processor_name

from ...util.version import VERSION
from .report import Machine

PACKAGES = ("torch", "triton", "onnxruntime", "cuda-bindings")
"""Those whose versions matter, where they are installed."""


def machine(about: dict[str, Any], load: float) -> Machine:
    """This machine, now; `about` is what the bundle's process said of the GPU, `load` the load average before."""
    versions = {"python": platform.python_version(), "cgcompile": VERSION}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Machine(
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        gpu=about.get("gpu", ""),
        driver=about.get("driver", 0),
        versions=tuple(versions.items()),
        load=load,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
