"""Operators with a C++ function for the CPU, in `operators.cpp`: an object file that is linked to the code that calls them."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from .standalone import HEADERS, INCLUDED

SOURCE = Path(__file__).with_name("operators.cpp")

_TENSOR, _OPTIONAL, _RESULT = "AtenTensorHandle", "AtenTensorHandle*", "AtenTensorHandle*"

DECLARED = {
    "language_model::int8_linear": (_TENSOR, _TENSOR, _TENSOR, _RESULT),
    "language_model::paged_attention": (
        *[_TENSOR] * 6, _OPTIONAL, "double", "int64_t", "int64_t", "double", "int64_t", _RESULT,
    ),
}  # fmt: skip
"""Parameter types of each operator's C++ function."""


def declaration(name: str) -> str:
    """Returns the C declaration of an operator's function, as Inductor calls it."""
    return f"AOTITorchError aoti_torch_cpu_{name.partition('::')[2]}({', '.join(DECLARED[name])})"


def registered() -> bool:
    """Whether a program of this process can call one of these operators: the module that defines it was imported."""
    names = [name.partition("::") for name in DECLARED]
    return any(hasattr(getattr(torch.ops, namespace), operator) for namespace, _, operator in names)


def command(compiler: str, target: Path) -> list[str]:
    """Returns the command that creates the object file at `target`.  `compiler`: a script that may replace -march=native."""
    options = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-w", "-DNDEBUG", "-DSTANDALONE_TORCH_HEADER"]
    headers = [f"-I{HEADERS}", f"-I{HEADERS / 'torch/csrc/api/include'}"]
    return [compiler, str(SOURCE), *options, *headers, "-c", "-o", str(target)]


def dependencies() -> Iterator[object]:
    """Yields everything on which the object file depends, except the compiler and its options for the processor."""
    yield SOURCE.read_bytes(), *[header.read_bytes() for header in INCLUDED]
    yield torch.__version__, torch.version.git_version, platform.libc_ver()
