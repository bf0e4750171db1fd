"""Caches shared objects of builds.  The cache key covers the program, weights, options, compilers and processor.

A cached object is used without importing Inductor's compiler.  The self-test verifies it like a newly compiled object.  Private
interfaces of torch (2.11, 2.13): `torch._inductor.config.save_config_portable`, and the same function of `torch._functorch.config`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from cgbundle.cpu.machine import processor_flags, processor_name

from ...util.content_cache import cache_folder, cache_optional, cache_path, recall, remember
from ..instruction_sets import Level
from ..kernels import operators
from ..kernels import standalone as standalone_code
from ..kernels.operator_calls import own_operators
from ..program_contents import tensor_layout
from ..requirements import compiler, described
from .aoti import Compiled, compile_cpu
from .compiler import HEADER, REGEX
from .interface import Begun

NOTES = ("aot_inductor.metadata",)
"""Options in which Inductor stores metadata of a compilation.  The first program of a process changes them, so the cache key
excludes them."""

ATEN = "ATEN_CPU_CAPABILITY"
"""The environment variable that selects instruction sets, also for Inductor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedObject:
    """The cached record: the file's bytes, and the processor features that its code uses."""

    code: bytes
    features: tuple[str, ...]


def kept_at(
    program: ExportedProgram, contents: str, shared: Collection[int], changing: bool, level: Level | None, standalone: bool | None
) -> Path | None:
    """Returns the cache path of the result of `compile_cpu` for the same arguments, or None without a usable cache.  `contents`:
    the program's hash from `program_contents`.  Raises cache-unsafe."""
    with cache_optional():
        return cache_path(cache_folder(), "host", contents, *_dependencies(program, tuple(shared), changing, level, standalone))
    return None


def compiled_and_kept(
    program: ExportedProgram,
    contents: str,
    shared: Collection[int],
    changing: bool,
    level: Level | None,
    standalone: bool | None,
    work: Path,
    begun: Begun | None,
    tell: Callable[[str], None],
) -> Compiled:
    """Calls `compile_cpu` and stores its result in the cache.  Raises the same errors, and cache-unsafe."""
    compiled = compile_cpu(program, work, tell, shared, changing, level, begun, standalone)
    options = program, contents, shared, changing, level
    _keep(kept_at(*options, standalone), compiled.path, compiled.features)
    if compiled.libtorch is not None:  # the build needs it if the code fails with functions of standalone.cpp
        _keep(kept_at(*options, False), compiled.libtorch, compiled.features)
    return compiled


def recalled(path: Path | None, work: Path) -> Compiled | None:
    """Writes the object that is cached at `path` into the folder `work`.  Returns None if the cache has none."""
    if path is None or (library := recall(path, SharedObject)) is None:
        return None
    target = work / "model.so"
    target.write_bytes(library.code)
    return Compiled(path=target, features=library.features, standalone=standalone_code.is_in(library.code), recalled=True)


def _keep(path: Path | None, shared_object: Path, features: tuple[str, ...]) -> None:
    if path is not None:
        with cache_optional():
            remember(path, SharedObject(code=shared_object.read_bytes(), features=features))


def _dependencies(
    program: ExportedProgram, shared: tuple[int, ...], changing: bool, level: Level | None, standalone: bool | None = False
) -> Iterator[object]:
    yield list(_values(program)), shared, changing, standalone, [] if standalone is False else list(standalone_code.dependencies())
    yield [tensor_layout(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(program.example_inputs)]
    yield str(sorted((str(symbol), str(limits)) for symbol, limits in program.range_constraints.items()))
    yield level, processor_name(), sorted(processor_flags()), os.uname().machine, platform.libc_ver(), os.environ.get(ATEN)
    yield described(compiler(), f"-march={level.name if level else 'native'}", "-v", "-E", "-x", "c++", os.devnull)
    yield described("strip", "--version")
    yield HEADER.read_bytes(), REGEX.read_bytes(), list(operators.dependencies()) if own_operators(program) else []
    yield torch.__version__, torch.version.git_version, torch.get_num_threads(), torch.get_default_dtype()
    yield torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled
    for config in (inductor_config, functorch_config):
        yield sorted([pair for pair in config.save_config_portable().items() if pair[0] not in NOTES])


def _values(program: ExportedProgram) -> Iterator[object]:
    """Yields the layout of every value, sizes as expressions with their example values, and the schemas of operators."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            yield str(node.target._schema) if isinstance(node.target, torch._ops.OpOverload) else ""
            for leaf in tree_leaves(node.meta.get("val")):
                if isinstance(leaf, torch.Tensor):
                    sizes = [*leaf.shape, *leaf.stride(), leaf.storage_offset()]
                    yield str(leaf.dtype), str(leaf.device), leaf.requires_grad, [_size(size) for size in sizes]
                else:
                    yield _size(leaf)


def _size(size: object) -> object:
    """Returns the text of a number, or a symbolic size with its value in the example."""
    return (str(size), size.node.hint) if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else repr(size)
