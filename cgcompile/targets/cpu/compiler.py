"""The C++ compiler as Inductor calls it: a script in front of the real one.

Inductor decides by itself which processor it compiles for, in ways that differ from version to version.  The script has the last
word, notes what the code was compiled for, and keeps the code from printing its errors.

What it defines by itself is asked once and kept: each question starts it, and all take as long as a small model.
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
"""Where headers of ours lie, for what Inductor writes: `HEADER` and `REGEX`."""

HEADER = HEADERS / "silent_errors.h"

REGEX = HEADERS / "regex"

RUNTIME = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_runtime"

INTERFACE = RUNTIME / "interface.h"
"""Where torch declares the C interface of the code (seen in 2.13)."""

MODEL = RUNTIME / "model_base.h"

EXPRESSION = 'std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");'
"""The only regular expression of `MODEL` (torch 2.11, 2.13), which `REGEX` stands for."""

ENDINGS = (("*.wrapper.cpp", True), ("*.cpp", False))
"""Patterns of names of generated files, the first that fits: whether it is the one around a model."""

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
    """`path` is what Inductor is given for the compiler."""

    path: Path
    notes: Path

    def options(self) -> list[tuple[str, ...]]:
        """The options about the processor of every compilation so far, each list once.  Raises torch-unsupported when there was
        none."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        if not lines:
            raise BuildError(
                "torch-unsupported", f"torch {torch.__version__}: Inductor did not call the compiler that it was given"
            )
        return [tuple(line.split()) for line in sorted(set(lines))]


def wrap(folder: Path, level: Level | None) -> WrappedCompiler:
    """Writes the script into `folder`.  `level`: None for the processors that are like this one."""
    folder.mkdir()
    path, notes = folder / os.path.basename(compiler()), folder / "options"  # Inductor tells compilers apart by their names
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
    """The options by which generated code finds headers of ours; `wrapper`: the file around a model, besides."""
    kept = () if "AOTInductorGetLastError" in INTERFACE.read_text() else ("-DCGCOMPILE_KEEPS_ERRORS",)  # torch 2.11 only prints
    text = MODEL.read_text()
    options = ("-include", str(HEADER), *kept)
    if wrapper and EXPRESSION in text and text.count("std::regex ") == 1:
        return (*options, "-I", str(HEADERS))
    return options


# --- what it defines by itself --------------------------------------------------------------------------------------

Ask = Callable[..., dict[str, str]]
"""The macros that a compiler defines with the options that it is called with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Macros:
    """What is kept: names with what they stand for."""

    defined: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilers:
    """`plain`: the C++ compiler.  `wrapped`: what Inductor is given for it, `compiler.wrap`."""

    plain: Ask
    wrapped: Ask


def ask_compilers(wrapped: str, level: Level | None) -> Compilers:
    """`wrapped`: the path of what Inductor is given, for `level`.  Asking raises compiler-failed and cache-unsafe."""
    about = described(compiler(), "-march=native", "-v", "-E", "-x", "c++", os.devnull)
    return Compilers(
        plain=_cached_macros(compiler(), about, "plain"),
        wrapped=_cached_macros(wrapped, about, f"for {level.name}" if level else "for this one"),
    )


def _cached_macros(command: str, *about: str) -> Ask:
    @cache
    def ask(*options: str) -> dict[str, str]:
        path = None
        with cache_optional():
            path = cache_path(cache_folder(), "compiler", *about, options)
        if path is not None and (kept_macros := recall(path, Macros)) is not None:
            return dict(kept_macros.defined)
        definitions = macros(command, *options)
        if path is not None:
            with cache_optional():
                remember(path, Macros(defined=tuple(definitions.items())))
        return definitions

    return ask
