"""Code that is compiled once for all models: the C interface of AOTInductor's code, and replacements of libtorch's functions.
Inductor copies torch's interface.cpp into the wrapper file of every model (`*.wrapper.cpp`).  This text and its templates take two
thirds of the compilation of a small model, and do not depend on the model.  So the text is compiled separately, kept in the content
cache, and linked.  It is compiled without -march, because it is only control code.

Private interface of torch (2.11, 2.13): this text, which the generated file contains unchanged, and its headers.  A file without
the text, or whose macros differ from DEFINED, is compiled unchanged.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import torch

from ...util.content_cache import cache_folder, cache_optional, cache_path, recall, remember
from ...util.scratch import scratch_folder
from ...util.workers import end_group
from ..instruction_sets import Level
from ..kernels import operators, standalone
from ..requirements import compiler, described
from .compiler import HEADER, REGEX, included, wrap
from .products import fast

TORCH = Path(torch.__file__).parent

TEXT = TORCH / "_inductor/codegen/aoti_runtime/interface.cpp"

FIRST = "#include <torch/csrc/inductor/aoti_include/cpu.h>\n"
"""The line before the text in the generated file."""

CONTAINER = "model_container.h"
"""The header of the interface's templates, which the rest of the wrapper file does not need."""

DEFINED = ("TORCH_INDUCTOR_CPP_WRAPPER", "STANDALONE_TORCH_HEADER", "C10_USING_CUSTOM_GENERATED_MACROS", "NDEBUG")
"""The macros of generated files for the CPU.  Other macros change classes in the headers (USE_CUDA)."""

WITHOUT_EFFECT = ("CPU_CAPABILITY_", "TORCH_INDUCTOR_PRECOMPILE_HEADERS")
"""Prefixes of macros that do not change classes of the interface: vector instructions, and precompiled headers."""

OPTIONS = (
    "-std=c++17", "-O1", "-fPIC", "-w", *[f"-D{name}" for name in DEFINED],
    f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}",
)  # fmt: skip
"""The C++ standard may differ from the model's, because the layout of classes in the standard library does not depend on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectFile:
    """The cached record."""

    code: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """The `text` of torch's file, and the future of its object file: a path, or None if the compiler fails."""

    text: str
    object_file: Future[Path | None]

    def without(self, source: str, command: Sequence[str]) -> str | None:
        """Returns a generated file without the text of the interface, or None if the file lacks it or `command` has other
        macros."""
        if source.count(self.text) != 1 or macros(command) != set(DEFINED):
            return None
        headers = [line for line in self.text.splitlines() if line.startswith("#include") and CONTAINER not in line]
        return source.replace(self.text, "\n".join([*headers, ""]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """Compilations that do not depend on a model.  `functions`: the object file of `kernels.standalone`, None if no code needs it.
    `operators`: that of `kernels.operators`, None if no program can call them."""

    interface: Interface | None
    functions: Future[Path | None] | None
    operators: Future[Path | None] | None

    def wait(self) -> None:
        """Waits until all compilations are done, because a forked process cannot wait for a thread of this process."""
        for future in (self.interface.object_file if self.interface is not None else None, self.functions, self.operators):
            if future is not None:
                future.result()


@contextmanager
def begun(level: Level | None, functions: bool | None) -> Iterator[Begun]:
    """Starts all compilations, for processors of a `level`.  `functions`: whether to compile `kernels.standalone`; if None,
    `products.fast` decides for this level."""
    with ExitStack() as stack:
        needs_functions = fast(level) if functions is None else functions
        has_compiler = shutil.which(compiler()) is not None
        yield Begun(
            interface=stack.enter_context(begun_interface()),
            functions=begun_object(standalone, level, stack) if needs_functions and has_compiler else None,
            operators=begun_object(operators, level, stack) if operators.registered() and has_compiler else None,
        )


def begun_object(source: ModuleType, level: Level | None, stack: ExitStack) -> Future[Path | None]:
    """Returns the future of the object file of `source`, a module of `kernels`, from the cache or from a compiler in the
    background.  The result is None if it fails."""
    folder, path = stack.enter_context(scratch_folder()), None
    about = described(compiler(), f"-march={level.name if level else 'native'}", "-v", "-E", "-x", "c++", os.devnull)
    name = source.SOURCE.stem
    with cache_optional():
        path = cache_path(cache_folder(), name, about, *source.dependencies())
    target = folder / f"{name}.o"
    return _begun(source.command(str(wrap(folder / "compiler", level).path), target), target, path, stack)


@contextmanager
def begun_interface() -> Iterator[Interface | None]:
    """Yields the interface, which is compiled in the background unless the cache has it.  Yields None if there is no compiler, or
    if torch has no such file.  Raises cache-unsafe."""
    if not TEXT.exists() or shutil.which(compiler()) is None:
        yield None
        return
    text, path = TEXT.read_text(), None
    with cache_optional():
        path = cache_path(cache_folder(), "interface", text, *_dependencies())
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        target = folder / "interface.o"
        (folder / "interface.cpp").write_text(FIRST + text)
        command = [compiler(), *OPTIONS, *included(wrapper=True), "-c", "-o", target.name, "interface.cpp"]
        yield Interface(text=text, object_file=_begun(command, target, path, stack))


def _begun(command: list[str], target: Path, path: Path | None, stack: ExitStack) -> Future[Path | None]:
    """Returns the future of the file `target`, from the cache at `path` or from `command` in the background.  The result is None if
    `command` fails."""
    if path is not None and (object_file := recall(path, ObjectFile)) is not None:
        target.write_bytes(object_file.code)
        future: Future[Path | None] = Future()
        future.set_result(target)
        return future
    process = subprocess.Popen(
        command, cwd=target.parent, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    )
    thread = stack.enter_context(ThreadPoolExecutor(1))
    stack.callback(end_group, process)  # runs before the thread pool waits for its thread
    return thread.submit(_compiled, process, target, path)


def _compiled(process: subprocess.Popen[bytes], target: Path, path: Path | None) -> Path | None:
    if process.wait():
        return None
    if path is not None:
        with cache_optional():
            remember(path, ObjectFile(code=target.read_bytes()))
    return target


def _dependencies() -> Iterator[object]:
    yield FIRST, OPTIONS, HEADER.read_bytes(), REGEX.read_bytes(), included(wrapper=True)
    yield torch.__version__, torch.version.git_version, os.uname().machine, platform.libc_ver()
    yield described(compiler(), "-v", "-E", "-x", "c++", os.devnull)


def macros(command: Sequence[str]) -> set[str]:
    """Returns the macros that a compiler command defines, except those of WITHOUT_EFFECT."""
    joined = [word.removeprefix("-D") for word in command if word.startswith("-D") and word != "-D"]
    separate = [word for option, word in pairwise(command) if option == "-D"]
    return {name for name in (*joined, *separate) if not name.startswith(WITHOUT_EFFECT)}
