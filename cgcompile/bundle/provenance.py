"""The provenance of a bundle: source, time, versions, machine and options."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Mapping

import torch

from cgbundle.cpu.machine import processor_name
from cgbundle.format.schema import Provenance

from ..util.version import VERSION


def provenance(label: str, options: Mapping[str, str]) -> Provenance:
    """Returns the provenance.  If SOURCE_DATE_EPOCH is set, it is the time of the build.  Then two builds can be equal byte for
    byte."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    timestamp = int(epoch) if epoch and epoch.isdigit() else time.time()
    now = datetime.datetime.fromtimestamp(timestamp, datetime.UTC)
    versions = {"cgcompile": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
    if importlib.util.find_spec("triton") is not None:
        versions["triton"] = importlib.metadata.version("triton")
    return Provenance(
        source=os.path.basename(label) if os.path.exists(label) else label,
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        versions=tuple(sorted(versions.items())),
        machine=processor_name(),
        options=tuple(sorted(options.items())),
    )
