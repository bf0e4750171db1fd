"""The C++ compiler that Inductor calls: a script that calls the real compiler.

Inductor selects the processor options itself, in ways that differ from version to version.  The script overrides them, records the
options of each compilation, and keeps the code from printing its errors.

The predefined macros of the compiler are queried once and cached.  All queries together take as long as compiling a small model.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ...errors import BuildError
from ...util.content_cache import cache_folder, cache_optional, cache_path, recall, remember
from ..instruction_sets import SWITCHED_OFF, X86_64, Level, macros
from ..requirements import compiler, described

HEADERS = Path(__file__).parent
"""The folder of headers that are added to Inductor's code: `HEADER` and `REGEX`."""

HEADER = HEADERS / "silent_errors.h"

REGEX = HEADERS / "regex"

RUNTIME = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_runtime"

INTERFACE = RUNTIME / "interface.h"
"""torch's declaration of the C interface of the code (seen in 2.13)."""

MODEL = RUNTIME / "model_base.h"

EXPRESSION = 'std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");'
"""The only regular expression of `MODEL` (torch 2.11, 2.13).  `REGEX` implements it."""

ENDINGS = (("*.wrapper.cpp", True), ("*.cpp", False))
"""Patterns of generated file names; the first match counts.  The flag is true for the wrapper file of a model."""

SCRIPT = """#!/bin/sh
source=$1
for option do
  shift
  case $option in
    -march=*|-mcpu=*) {machine} ;;
    -m*) {extension} ;;
    *) set -- "$@" "$option" ;;
  esac
done
case " $* " in *" -c "*)
  for option do case $option in -m*) printf '%s ' "$option" ;; esac; done >> {notes}
  echo >> {notes}
esac
exec {compiler} "$@"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrappedCompiler:
    """`path`: the compiler that Inductor gets.  `notes`: a file with the options of each compilation."""

    path: Path
    notes: Path

    def options(self) -> list[tuple[str, ...]]:
        """Returns the processor options of all compilations so far, each list once.  Raises torch-unsupported if there are none."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        if not lines:
            raise BuildError(
                "torch-unsupported", f"torch {torch.__version__}: Inductor did not call the compiler that it was given"
            )
        return [tuple(line.split()) for line in sorted(set(lines))]


def wrap(folder: Path, level: Level | None) -> WrappedCompiler:
    """Writes the script into `folder`.  `level`: the target processors, None for the processor of this machine."""
    folder.mkdir()
    path, notes = folder / os.path.basename(compiler()), folder / "options"  # Inductor identifies a compiler by its name
    if level is not None:
        machine, extension = f'set -- "$@" -march={level.name}', ":"
    else:
        off = " ".join(SWITCHED_OFF) if os.uname().machine == X86_64 else ""
        machine, extension = f'set -- "$@" "$option" {off}', 'set -- "$@" "$option"'
    cases = (f'{ending}) set -- "$@" {shlex.join(included(wrapper))} ;;' for ending, wrapper in ENDINGS)
    machine += f"; case $source in {' '.join(cases)} esac"
    text = SCRIPT.format(machine=machine, extension=extension, notes=shlex.quote(str(notes)), compiler=shlex.quote(compiler()))
    path.write_text(text)
    path.chmod(0o700)
    return WrappedCompiler(path=path, notes=notes)


def included(wrapper: bool) -> tuple[str, ...]:
    """Returns the options that add HEADER and REGEX to generated code.  `wrapper`: for the wrapper file of a model."""
    keep = () if "AOTInductorGetLastError" in INTERFACE.read_text() else ("-DCGCOMPILE_KEEPS_ERRORS",)  # torch 2.11 only prints
    text = MODEL.read_text()
    options = ("-include", str(HEADER), *keep)
    if wrapper and EXPRESSION in text and text.count("std::regex ") == 1:
        return (*options, "-I", str(HEADERS))
    return options


# --- predefined macros ----------------------------------------------------------------------------------------------

Ask = Callable[..., dict[str, str]]
"""A function that returns the macros which a compiler defines with the given options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Macros:
    """The cached record: names and values of macros."""

    defined: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilers:
    """Macro queries.  `plain`: for the C++ compiler.  `wrapped`: for the script of `wrap` that Inductor calls."""

    plain: Ask
    wrapped: Ask


def ask_compilers(wrapped: str, level: Level | None) -> Compilers:
    """Returns both queries.  `wrapped`: the path of the script for `level`.  A query raises compiler-failed and cache-unsafe."""
    description = described(compiler(), "-march=native", "-v", "-E", "-x", "c++", os.devnull)
    return Compilers(
        plain=_cached_macros(compiler(), description, "plain"),
        wrapped=_cached_macros(wrapped, description, f"for {level.name}" if level else "for this one"),
    )


def _cached_macros(command: str, *description: str) -> Ask:
    @cache
    def ask(*options: str) -> dict[str, str]:
        path = None
        with cache_optional():
            path = cache_path(cache_folder(), "compiler", *description, options)
        if path is not None and (kept_macros := recall(path, Macros)) is not None:
            return dict(kept_macros.defined)
        definitions = macros(command, *options)
        if path is not None:
            with cache_optional():
                remember(path, Macros(defined=tuple(definitions.items())))
        return definitions

    return ask
