"""How Inductor compiles C++, made quicker: the files of a program side by side, and no compilations that only ask something.

Private interfaces (torch 2.11, 2.13): `torch._inductor.cpp_builder.CppBuilder`, whose `build` compiles or links;
`torch._inductor.cpu_vec_isa`, whose `VecISA.check_build` compiles and loads a probe for an instruction set, a second each, and
keeps the answers for the process; `torch._inductor.exc.CppCompileError`; `torch._inductor.codecache.CacheBase.get_system`.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import torch
from torch._inductor import codecache, cpp_builder, cpu_vec_isa, exc

from ...errors import BuildError
from ...util.workers import end_group
from ..kernels import operators
from ..kernels import standalone as standalone_code
from .compiler import Compilers
from .interface import Interface

WRAPPER = ".wrapper.cpp"

ASIDE = (WRAPPER, ".kernel.cpp")
"""Endings of the sources of a program: what is made of them is first needed by the linker."""

NEWER, OLDER = "-std=c++20", "-std=c++17"
"""Inductor asks for the newer standard from torch 2.13 on.  Its headers compile by the older one, too, and a fifth faster: those of
the standard library are smaller.  Both are laid out alike, and compute the same."""

CONTROL = {"-O1": "-Og"}
"""The file around a model calls kernels, and computes nothing: with fewer passes it compiles in half the time (30 layers: 5 s
instead of 11, 16 % smaller), and runs as fast."""

LIBTORCH = "libtorch.so"
"""The name of a shared object that is linked to torch's libraries beside one that is not."""

LINKING = "-shared"
"""What is in the linker's command alone."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A source of a program, which is being compiled by another command than Inductor's, `command`, or without `interface`.
    `whole`: the text that Inductor wrote."""

    path: Path
    command: list[str]
    whole: str
    running: Running
    interface: Interface | None


@contextmanager
def side_by_side(
    interface: Interface | None, functions: OwnFunctions | None = None, called: Future[Path | None] | None = None
) -> Iterator[None]:
    """While it lasts, Inductor goes on when it has begun to compile a source of a program, and the interface in it is taken from
    `interface`.  Before it links anything it waits for all of them.  `functions`: what is linked in libtorch's place, where that is
    all that the code calls; the same linked to libtorch then lies beside it as LIBTORCH, unless they are `required`.
    `called`: the object file of operators of ours, which is linked to either.  Raises torch-unsupported, compiler-failed, and
    not-standalone where it has to be."""
    plain = getattr(cpp_builder.CppBuilder, "build", None)
    if plain is None or not hasattr(cpp_builder.CppBuilder, "get_command_line"):
        raise _unsupported("torch._inductor.cpp_builder.CppBuilder.build")
    begun: list[Source] = []
    with ExitStack() as stack:

        def build(self: Any) -> None:
            command = shlex.split(self.get_command_line())
            source = next((Path(word) for word in command if word.endswith(ASIDE)), None)
            if "-c" in command and source is not None:
                begun.append(_begin(command, source, interface, stack))
            elif LINKING in command:
                sources = [*begun]
                begun.clear()  # what is tried after a failure has sources of its own
                linked = [*_finished(sources, stack), *_operators(called)]
                output = command.index("-o") + 1
                folder = Path(command[output]).parent
                whole = [command[0], *linked, *command[1:]]
                if functions is not None and _linked_alone(whole, functions, folder, stack):
                    whole[len(linked) + output] = str(folder / LIBTORCH)
                if functions is None or not functions.required:
                    _start(whole, folder, stack).wait()
            else:
                plain(self)

        stack.enter_context(patch.object(cpp_builder.CppBuilder, "build", build))
        yield


def _begin(command: list[str], path: Path, interface: Interface | None, stack: ExitStack) -> Source:
    whole = path.read_text()
    rest = interface.without(whole, command) if interface is not None else None
    if rest is not None:
        path.write_text(rest)
    quicker = {NEWER: OLDER, **(CONTROL if path.name.endswith(WRAPPER) else {})}
    running = _start([quicker.get(word, word) for word in command], path.parent, stack)
    return Source(path=path, command=command, whole=whole, running=running, interface=interface if rest is not None else None)


def _finished(sources: list[Source], stack: ExitStack) -> list[str]:
    """As `_finish` of each.  The first that fails ends the others."""
    try:
        return [object_file for source in sources for object_file in _finish(source, stack)]
    except exc.CppCompileError:
        for source in sources:
            end_group(source.running.process)
        raise


def _finish(source: Source, stack: ExitStack) -> list[str]:
    """Waits for a source, and returns what is linked besides.  What the compiler refuses is compiled as Inductor would.  Raises
    CppCompileError."""
    with suppress(exc.CppCompileError):
        source.running.wait()
        if source.interface is None:
            return []
        if (object_file := source.interface.object_file.result()) is not None:
            return [str(object_file)]
    source.path.write_text(source.whole)
    _start(source.command, source.path.parent, stack).wait()
    return []


def _operators(called: Future[Path | None] | None) -> list[str]:
    if called is None:
        return []
    if (path := called.result()) is None:
        raise BuildError("compiler-failed", f"the C++ compiler refuses {operators.SOURCE}")
    return [str(path)]


# --- in libtorch's place ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFunctions:
    """What is linked in libtorch's place: an object file, or None where the compiler refuses it.  `required`: where the code calls
    more, the build fails; else it gets libtorch's."""

    object_file: Future[Path | None]
    required: bool


def _linked_alone(command: list[str], functions: OwnFunctions, folder: Path, stack: ExitStack) -> bool:
    """Links with the functions of ours; False where the code calls others, or the compiler does not take them."""
    if (path := functions.object_file.result()) is None:
        if functions.required:
            raise BuildError("compiler-failed", f"the C++ compiler refuses {standalone_code.SOURCE}")
        return False
    linking = _start([*command, str(path), *standalone_code.LINKED], folder, stack)
    try:
        linking.wait()
    except exc.CppCompileError as error:
        if not functions.required:
            return False
        linking.said.seek(0)
        raise standalone_code.missing(linking.said.read().decode(errors="replace")) or error from error
    return True


def _start(command: list[str], folder: Path, stack: ExitStack) -> Running:
    """Begins a command, which ends with `stack` at the latest."""
    stack.enter_context(said := tempfile.TemporaryFile())  # noqa: SIM115
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, process_group=0
    )
    stack.callback(process.wait)
    stack.callback(end_group, process)
    return Running(command=command, process=process, said=said)


@contextmanager
def unnamed_machine() -> Iterator[None]:
    """While it lasts, Inductor has no name for the state of the machine.  It is for caches, and the one here is this build's alone;
    what it is made of, a hash of all of Triton, takes a third of a second, for the CPU too."""
    with ExitStack() as stack:
        if hasattr(codecache.CacheBase, "get_system"):
            stack.enter_context(patch.object(codecache.CacheBase, "get_system", staticmethod(lambda: {"hash": "this"})))
        yield


@contextmanager
def unprobed(compilers: Compilers) -> Iterator[None]:
    """While it lasts, Inductor takes an instruction set for usable where the processor has it, which it finds out by itself, and
    where the compiler that it calls turns it on when it is told to.  Raises torch-unsupported."""
    if not hasattr(cpu_vec_isa.VecISA, "check_build"):
        raise _unsupported("torch._inductor.cpu_vec_isa.VecISA.check_build")

    def usable(self: Any, code: str) -> bool:
        options = self.build_arch_flags().split()
        try:
            return _turned_on(compilers, options)
        except BuildError:  # it does not know an option
            return False

    _forget_answers()
    with patch.object(cpu_vec_isa.VecISA, "check_build", usable):
        try:
            yield
        finally:
            _forget_answers()


def _turned_on(compilers: Compilers, options: list[str]) -> bool:
    """Whether the compiler as Inductor calls it compiles for what it is told to: it may have been told something else."""
    wanted = compilers.plain(*options).keys() - compilers.plain().keys()
    return wanted <= compilers.wrapped("-march=native", *options).keys()


def _forget_answers() -> None:
    """Another target has other answers."""
    for kind in [cpu_vec_isa.VecISA, *_kinds(cpu_vec_isa.VecISA)]:
        for name in ("__bool__", "_VecISA__bool__impl"):
            getattr(vars(kind).get(name), "cache_clear", bool)()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def _kinds(kind: type) -> list[type]:
    below: list[type] = kind.__subclasses__()
    return [descendant for subclass in below for descendant in (subclass, *_kinds(subclass))]


def _unsupported(name: str) -> BuildError:
    return BuildError(
        "torch-unsupported", f"torch {torch.__version__}: Inductor has no {name}; cgcompile was tested with 2.11 and 2.13"
    )
