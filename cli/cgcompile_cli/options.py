"""Arguments and options that several commands have."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from .errors import UsageError

BundlePath = Annotated[str, typer.Argument(metavar="BUNDLE", help="The bundle's directory.", show_default=False)]

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="model.py, package.module:attribute, or a .pt2 file.", show_default=False)
]

HostOps = Annotated[
    list[str] | None,
    typer.Option("--host-op", metavar="NAME", help="Keep an operator out of graphs, e.g. mylib::op; may be repeated."),
]


def check_writable(path: str) -> None:
    """Raises UsageError where a file cannot be written: before the work, not after."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(folder, os.W_OK) or (os.path.exists(path) and not os.access(path, os.W_OK)):
        raise UsageError(f"{path}: cannot be written", "name a file in a folder that exists")
