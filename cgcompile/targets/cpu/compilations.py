"""Speeds up Inductor's C++ compilations: compiles the files of a program in parallel, and skips probes of instruction sets.

Private interfaces (torch 2.11, 2.13): `torch._inductor.cpp_builder.CppBuilder`, whose `build` compiles or links;
`torch._inductor.cpu_vec_isa`, whose `VecISA.check_build` compiles and loads a probe per instruction set, a second each, and caches
the results; `torch._inductor.exc.CppCompileError`; `torch._inductor.codecache.CacheBase.get_system`.
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
"""Endings of the sources of a program, which are compiled in the background: only the linker needs their object files."""

NEWER, OLDER = "-std=c++20", "-std=c++17"
"""Inductor uses the newer standard from torch 2.13 on.  Its headers also compile with the older standard, a fifth faster, because
the headers of the standard library are smaller.  Class layouts and results are the same."""

CONTROL = {"-O1": "-Og"}
"""The wrapper file of a model only calls kernels.  With fewer optimization passes it compiles in half the time (30 layers: 5 s
instead of 11, 16 % smaller), and runs as fast."""

LIBTORCH = "libtorch.so"
"""The file name of the shared object that is linked to torch's libraries, beside a standalone shared object."""

LINKING = "-shared"
"""An option that only the linker's command has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A compilation in the background, and the file with the compiler's output."""

    command: list[str]
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def wait(self) -> None:
        """Waits for the compiler.  Raises CppCompileError if it fails."""
        if self.process.wait():
            self.output.seek(0)
            raise exc.CppCompileError(self.command, self.output.read().decode(errors="replace"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A source file that is compiled with options other than those of Inductor's `command`, and without the text of `interface`.
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
    """While active, runs Inductor's compilations of a program's sources in the background.  They link the object file of
    `interface` instead of compiling its text.  The linker waits for all of them.  `functions`: linked in place of libtorch if the
    code calls no other function of libtorch.  LIBTORCH, the same code linked to libtorch, is then written beside the result, unless
    the functions are `required`.  `called`: the object file of `kernels.operators`, which is linked to both.  Raises
    torch-unsupported, compiler-failed, and not-standalone if required functions are missing."""
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
                begun.clear()  # an attempt after a failure has other sources
                linked = [*_finished(sources, stack), *_operators(called)]
                output = command.index("-o") + 1
                folder = Path(command[output]).parent
                link_command = [command[0], *linked, *command[1:]]
                if functions is not None and _linked_alone(link_command, functions, folder, stack):
                    link_command[len(linked) + output] = str(folder / LIBTORCH)
                if functions is None or not functions.required:
                    _start(link_command, folder, stack).wait()
            else:
                plain(self)

        stack.enter_context(patch.object(cpp_builder.CppBuilder, "build", build))
        yield


def _begin(command: list[str], path: Path, interface: Interface | None, stack: ExitStack) -> Source:
    text = path.read_text()
    shortened = interface.without(text, command) if interface is not None else None
    if shortened is not None:
        path.write_text(shortened)
    quicker = {NEWER: OLDER, **(CONTROL if path.name.endswith(WRAPPER) else {})}
    running = _start([quicker.get(word, word) for word in command], path.parent, stack)
    return Source(path=path, command=command, whole=text, running=running, interface=interface if shortened is not None else None)


def _finished(sources: list[Source], stack: ExitStack) -> list[str]:
    """Calls `_finish` for each source.  The first failure ends the other compilations."""
    try:
        return [object_file for source in sources for object_file in _finish(source, stack)]
    except exc.CppCompileError:
        for source in sources:
            end_group(source.running.process)
        raise


def _finish(source: Source, stack: ExitStack) -> list[str]:
    """Waits for the compilation of a source, and returns further object files to link.  If it fails, compiles Inductor's text with
    Inductor's command.  Raises CppCompileError."""
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


# --- linking in place of libtorch -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFunctions:
    """Functions to link in place of libtorch: an object file, or None if it does not compile.  `required`: if the code calls other
    functions, the build fails instead of linking libtorch."""

    object_file: Future[Path | None]
    required: bool


def _linked_alone(command: list[str], functions: OwnFunctions, folder: Path, stack: ExitStack) -> bool:
    """Links with these functions only.  If the code calls other functions, or `functions` do not compile, raises if they are
    `required`, else returns False."""
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
        linking.output.seek(0)
        raise standalone_code.missing(linking.output.read().decode(errors="replace")) or error from error
    return True


def _start(command: list[str], folder: Path, stack: ExitStack) -> Running:
    """Starts a command, which ends at the latest when `stack` closes."""
    stack.enter_context(output := tempfile.TemporaryFile())  # noqa: SIM115
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0
    )
    stack.callback(process.wait)
    stack.callback(end_group, process)
    return Running(command=command, process=process, output=output)


@contextmanager
def unnamed_machine() -> Iterator[None]:
    """While active, replaces Inductor's hash of the machine by a constant.  Its caches need the hash, but the cache here belongs to
    one build.  The hash covers all of Triton, and takes a third of a second even for the CPU."""
    with ExitStack() as stack:
        if hasattr(codecache.CacheBase, "get_system"):
            stack.enter_context(patch.object(codecache.CacheBase, "get_system", staticmethod(lambda: {"hash": "this"})))
        yield


@contextmanager
def unprobed(compilers: Compilers) -> Iterator[None]:
    """While active, makes Inductor use an instruction set if the processor has it and the compiler enables it with the set's
    options.  Inductor itself checks the processor.  Raises torch-unsupported."""
    if not hasattr(cpu_vec_isa.VecISA, "check_build"):
        raise _unsupported("torch._inductor.cpu_vec_isa.VecISA.check_build")

    def usable(self: Any, code: str) -> bool:
        options = self.build_arch_flags().split()
        try:
            return _turned_on(compilers, options)
        except BuildError:  # the compiler does not know an option
            return False

    _forget_answers()
    with patch.object(cpu_vec_isa.VecISA, "check_build", usable):
        try:
            yield
        finally:
            _forget_answers()


def _turned_on(compilers: Compilers, options: list[str]) -> bool:
    """Whether the wrapped compiler defines the macros that the options define.  The wrapper may replace the options."""
    enabled = compilers.plain(*options).keys() - compilers.plain().keys()
    return enabled <= compilers.wrapped("-march=native", *options).keys()


def _forget_answers() -> None:
    """Clears the cached results, because another target has other results."""
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
