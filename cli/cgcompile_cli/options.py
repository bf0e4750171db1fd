"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

BundlePath = Annotated[str, typer.Argument(metavar="BUNDLE", help="The bundle's directory.", show_default=False)]

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="model.py, package.module:attribute, or a .pt2 file.", show_default=False)
]

HostOps = Annotated[
    list[str] | None,
    typer.Option("--host-op", metavar="NAME", help="Keep an operator out of graphs, e.g. mylib::op; may be repeated."),
]
