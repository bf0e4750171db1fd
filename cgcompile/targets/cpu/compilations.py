"""How Inductor compiles C++, made quicker: the files of a program side by side, and no compilations that only ask something.

Private interfaces (torch 2.11, 2.13): `torch._inductor.cpp_builder.CppBuilder`, whose `build` compiles or links;
`torch._inductor.cpu_vec_isa`, whose `VecISA.check_build` compiles and loads a probe for an instruction set, a second each, and
keeps the answers for the process; `torch._inductor.exc.CppCompileError`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any
from unittest.mock import patch

import torch
from torch._inductor import cpp_builder, cpu_vec_isa, exc

from ...errors import BuildError
from ...util.workers import end_group
from ..instruction_sets import macros
from ..requirements import compiler as own_compiler

ASIDE = (".wrapper.cpp", ".kernel.cpp")
"""Endings of the sources of a program: what is made of them is first needed by the linker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A compilation that goes on while Inductor prepares the next one, and what the compiler says."""

    command: list[str]
    process: subprocess.Popen[bytes]
    said: IO[bytes]

    def wait(self) -> None:
        """Raises CppCompileError when the compiler fails."""
        if self.process.wait():
            self.said.seek(0)
            raise exc.CppCompileError(self.command, self.said.read().decode(errors="replace"))


@contextmanager
def side_by_side() -> Iterator[None]:
    """While it lasts, Inductor goes on when it has begun to compile a source of a program.  Before it builds anything else it waits
    for all of them.  Raises torch-unsupported."""
    plain = getattr(cpp_builder.CppBuilder, "build", None)
    if plain is None or not hasattr(cpp_builder.CppBuilder, "get_command_line"):
        raise _unsupported("torch._inductor.cpp_builder.CppBuilder.build")
    running: list[Running] = []
    with ExitStack() as stack:

        def build(self: Any) -> None:
            command = shlex.split(self.get_command_line())
            if "-c" in command and any(word.endswith(ASIDE) for word in command):
                running.append(_start(command, stack))
                return
            while running:
                running.pop(0).wait()
            plain(self)

        stack.enter_context(patch.object(cpp_builder.CppBuilder, "build", build))
        yield


def _start(command: list[str], stack: ExitStack) -> Running:
    """Begins a compilation, which ends with `stack` at the latest."""
    stack.enter_context(said := tempfile.TemporaryFile())  # noqa: SIM115
    folder = os.path.dirname(next(word for word in command if word.endswith(ASIDE)))
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, process_group=0
    )
    stack.callback(process.wait)
    stack.callback(end_group, process)
    return Running(command=command, process=process, said=said)


@contextmanager
def unprobed(compiler: str) -> Iterator[None]:
    """While it lasts, Inductor takes an instruction set for usable where the processor has it, which it finds out by itself, and
    where `compiler` turns it on when it is told to.  Raises torch-unsupported."""
    if not hasattr(cpu_vec_isa.VecISA, "check_build"):
        raise _unsupported("torch._inductor.cpu_vec_isa.VecISA.check_build")

    def usable(self: Any, code: str) -> bool:
        options = self.build_arch_flags().split()
        try:
            return _turned_on(compiler, options)
        except BuildError:  # it does not know an option
            return False

    _forget_answers()
    with patch.object(cpu_vec_isa.VecISA, "check_build", usable):
        try:
            yield
        finally:
            _forget_answers()


def _turned_on(compiler: str, options: list[str]) -> bool:
    """Whether the compiler as Inductor calls it compiles for what it is told to: it may have been told something else."""
    plain = own_compiler()
    wanted = macros(plain, *options).keys() - macros(plain).keys()
    return wanted <= macros(compiler, "-march=native", *options).keys()


def _forget_answers() -> None:
    """Another target has other answers."""
    for kind in [cpu_vec_isa.VecISA, *_kinds(cpu_vec_isa.VecISA)]:
        for name in ("__bool__", "_VecISA__bool__impl"):
            getattr(vars(kind).get(name), "cache_clear", bool)()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def _kinds(kind: type) -> list[type]:
    below: list[type] = kind.__subclasses__()
    return [each for own in below for each in (own, *_kinds(own))]


def _unsupported(name: str) -> BuildError:
    return BuildError(
        "torch-unsupported", f"torch {torch.__version__}: Inductor has no {name}; cgcompile was tested with 2.11 and 2.13"
    )
