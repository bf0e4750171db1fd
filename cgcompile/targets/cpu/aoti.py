"""Lowering for the cpu target: AOTInductor compiles the exported program to one shared object without weights.  Private interfaces:
`torch._inductor.aot_compile`, its `exc.CppCompileError`, and the options below (tested with torch 2.13 and 2.11)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch._inductor.exc import CppCompileError
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves

from cgbundle.cpu.machine import processor_flags

from ...errors import BuildError, causes
from ...export.assertions import spell_conditions
from ...partition.straight_parts import written_tensors
from ...util.garbage_collection import quick_imports
from ...util.raw_bytes import copied, put_back
from ..compiler_errors import explain
from ..instruction_sets import Level, needed
from ..kernels import operators
from ..kernels import standalone as standalone_code
from ..kernels.operator_calls import options as operator_options
from ..kernels.operator_calls import own_operators
from ..requirements import check_compiler
from ..weights import used_weights
from .compiler import ask_compilers, wrap
from .interface import Begun, begun_object
from .interface import begun as begin
from .products import lacking, suits

TESTED = "2.13"

OPTIONS = {
    "aot_inductor.package": False,  # a plain shared object, not a zip
    "aot_inductor.package_constants_in_so": False,  # weights are files of the bundle
    # the runtime has already loaded the libraries that define the symbols; in a CUDA build of torch, a dependency on libtorch.so
    # would also load its CUDA libraries, or fail if they are missing
    "aot_inductor.link_libtorch": False,
    "aot_inductor.precompile_headers": False,  # saves time only if many models share one cache
    "aot_inductor.enable_line_tables": False,  # without debug information, which would be four fifths of the file
    "cpp.vec_isa_ok": True,  # see `compilations.unprobed`; compiling a probe per instruction set takes 7 s
}
"""Options of Inductor.  Options that this version of torch lacks are left out."""

FILE_NAME = re.compile(rb"/c[a-z2-7]{51}\.")
"""Inductor's name of a generated file: "c" and a SHA-256 in base 32 (torch._inductor.codecache.code_hash)."""

UNFOLDED = {"always_keep_tensor_constants": True, "joint_graph_constant_folding": False}
"""Further options for a program whose weights may change.  Inductor would write small constants into the code as numbers, and also
those whose elements are all equal, even mutated buffers.  Every call would then start from the values at build time (2.13)."""

KEPT = {"always_keep_tensor_constants": True}
"""Options for a program with small weights: Inductor would write their values into the code, and an update could not replace them.
Also for a weight of no dimensions that is an argument of a library call.  Inductor would turn it into a number, and the number into
a new constant, whose value it does not export (seen with 2.13: the scales of `_scaled_mm`)."""

NOT_REUSED = {"allow_buffer_reuse": False}
"""Options for a program with branches or loops: torch 2.11 plans all memory for the peak of a single body, and fails."""

INLINED = 8
"""Inductor writes 1-d weights of up to this many elements into the code (GraphLowering.can_inline_constant, 2.11 and 2.13)."""

UNVECTORIZED = {"cpp.simdlen": 1}
"""Options if vectorized code does not compile (torch 2.11: a mask over a value that is the same for all lanes, as in a Swin
Transformer)."""

UNFOLDED_COMPLEX = {"joint_graph_constant_folding": False}
"""Options for complex numbers: folding would add `aten.full` for equal elements, after complex_numbers.py has replaced it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A shared object, and the processor features that its code uses.  `standalone`: it needs no library of torch.  `recalled`: it
    comes from the cache.  `libtorch`: the same code, linked to torch's libraries."""

    path: Path
    features: tuple[str, ...]
    standalone: bool
    recalled: bool = False
    libtorch: Path | None = None


def compile_cpu(
    program: ExportedProgram,
    work: Path,
    tell: Callable[[str], None],
    shared: Collection[int] = (),
    changing: bool = False,
    level: Level | None = None,
    begun: Begun | None = None,
    standalone: bool | None = False,
) -> Compiled:
    """Compiles `program` to a shared object in the folder `work`.

    `changing`: its weights may change.  `shared`: positions of outputs that must be copies.  Without the copies the code would
    return one tensor as two outputs, or a constant, and the caller would free it twice (seen with torch 2.13).  `level`: the target
    processors, None for the processor of this machine.  `begun`: compilations that are already running; None starts them here.
    `standalone`: whether to link the functions of kernels/standalone.cpp in place of libtorch's; None: if `products.suits`.  Raises
    compiler-failed, not-standalone, torch-unsupported, cache-unsafe.
    """
    with nullcontext(begun) if begun is not None else begin(level, standalone) as compilations:
        return _compiled(program, work, tell, shared, changing, level, compilations, standalone)


def _compiled(
    program: ExportedProgram,
    work: Path,
    tell: Callable[[str], None],
    shared: Collection[int],
    changing: bool,
    level: Level | None,
    begun: Begun,
    standalone: bool | None,
) -> Compiled:
    tell("loading Inductor")
    with quick_imports():  # the import takes two seconds, and a cached program does not need it
        from ...transforms.inductor_passes import mended, passes, unchecked_puts
        from .compilations import LIBTORCH, OwnFunctions, side_by_side, unnamed_machine, unprobed
        from .complex_numbers import complex_decompositions
        from .dispatch import fallbacks_through_dispatcher
        from .loops import exceptions_after_loops, materialized_before_reshapes, threads_read_at_run_time

    if not hasattr(torch._inductor, "aot_compile"):
        raise BuildError(
            "torch-unsupported", f"torch {torch.__version__} has no torch._inductor.aot_compile; cgcompile was tested with {TESTED}"
        )
    check_compiler()
    target = work / "model.so"
    config = torch._inductor.config.get_config_copy()
    small = _small_weights(program)
    changing = changing or 1 in small
    requested = OPTIONS | (UNFOLDED_COMPLEX if _has_complex(program) else {}) | (UNFOLDED if changing else {})
    requested = requested | (KEPT if small or _libraries_take_numbers(program) else {})
    requested = requested | (NOT_REUSED if torch.__version__ < "2.12" and _has_bodies(program) else {})
    if changing and (missing := sorted(UNFOLDED.keys() - config.keys())):
        raise BuildError(
            "torch-unsupported",
            f"torch {torch.__version__}: Inductor has no option {missing[0]}; cgcompile was tested with {TESTED}",
        )
    options: dict[str, Any] = {name: value for name, value in requested.items() if name in config}
    wrapped = wrap(work / "compiler", level)
    options["cpp.cxx"] = (None, str(wrapped.path))
    called_operators = own_operators(program)
    options |= {**passes(ahead=True), **operator_options(called_operators)}
    if level is not None:
        options["cpp.simdlen"] = level.vector_bits
    functions = None
    if standalone and (operator := lacking(program)):
        raise BuildError("not-standalone", f"the program has {operator}, which only torch's libraries compute")
    if begun.functions is not None and (standalone or (standalone is None and suits(program, level))):
        functions = OwnFunctions(object_file=begun.functions, required=standalone is not None)
    compilers = ask_compilers(str(wrapped.path), level)
    compiled = (_private_cache(work / "cache"), unnamed_machine(), _watched(work, tell), unprobed(compilers))
    generated = (
        fallbacks_through_dispatcher(),
        complex_decompositions(),
        threads_read_at_run_time(),
        exceptions_after_loops(),
        materialized_before_reshapes(),
    )
    with ExitStack() as stack:
        shims = begun.operators or begun_object(operators, level, stack) if called_operators else None
        parallel = side_by_side(begun.interface, functions, shims)
        for context in (*compiled, parallel, *generated, mended(), unchecked_puts(program.graph_module), torch.no_grad()):
            stack.enter_context(context)
        options["aot_inductor.output_path"] = str(target)
        try:
            shared_object = _aot_compiled(program, shared, options)
        except Exception as error:
            if (build_error := _build_error(error)) is not None:
                raise build_error from error
            if level is not None or not any(isinstance(exception, CppCompileError) for exception in causes(error)):
                raise BuildError("compiler-failed", str(explain(error, program.graph_module))) from error
            tell("the C++ compiler refuses the vectorized code: again without vectors")
            try:
                shared_object = _aot_compiled(program, shared, options | UNVECTORIZED)
            except Exception as second:
                raise _build_error(second) or BuildError("compiler-failed", str(explain(second, program.graph_module))) from second
    if not isinstance(shared_object, str) or not target.exists():
        raise BuildError(
            "torch-unsupported", f"torch {torch.__version__}: aot_compile gave no shared object; cgcompile was tested with {TESTED}"
        )
    libtorch = work / LIBTORCH
    for library in (target, libtorch):
        if library.exists():
            _make_reproducible(library, work)
    features = needed(compilers.plain, wrapped.options(), os.uname().machine, processor_flags())
    alone = standalone_code.is_in(target.read_bytes())
    return Compiled(path=target, features=features, standalone=alone, libtorch=libtorch if libtorch.exists() else None)


def import_inductor() -> None:
    """Imports the modules that a compilation needs, so that processes forked later have them."""
    with quick_imports():
        import torch._inductor.compile_fx  # noqa: F401

        from . import compilations, complex_numbers, dispatch, loops, symbols  # noqa: F401


def _aot_compiled(program: ExportedProgram, shared: Collection[int], options: Mapping[str, Any]) -> object:
    from .symbols import decided_alike, named_assertions  # imported late, as in `_compiled`

    module = _with_copies(with_buffers(program.module()), shared)
    spell_conditions(module)
    values = [None for _ in module.graph.find_nodes(op="placeholder")]
    state = [tensor for tensor in written_tensors(module, values) if isinstance(tensor, torch.Tensor)]
    before = [copied(tensor) for tensor in state]
    try:
        with decided_alike(program), named_assertions(program):
            return torch._inductor.aot_compile(module, program.example_inputs[0], options=dict(options))
    finally:
        # restores the state: if the program copies one buffer to another, Inductor does so while it compiles (2.11 and 2.13)
        for buffer, value in zip(state, before, strict=True):
            put_back(buffer.detach(), value)


def _has_bodies(program: ExportedProgram) -> bool:
    return sum(isinstance(module, torch.fx.GraphModule) for module in program.graph_module.modules()) > 1


def _has_complex(program: ExportedProgram) -> bool:
    values = [leaf for node in program.graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    return any(isinstance(leaf, torch.Tensor) and leaf.is_complex() for leaf in values)


def _small_weights(program: ExportedProgram) -> set[int]:
    """Returns the numbers of elements of used parameters and buffers whose values Inductor would write into the code or, for a
    single element, use while it compiles.  Excludes constants, because an update cannot replace them."""
    used = [program.state_dict[name] for name in used_weights(program) if name in program.state_dict]
    return {tensor.numel() for tensor in used if tensor.numel() == 1 or (tensor.dim() == 1 and tensor.numel() <= INLINED)}


def _libraries_take_numbers(program: ExportedProgram) -> bool:
    """Whether an operation that is not pointwise reads a weight of no dimensions, which GraphLowering.get_attr makes a number.  It
    may read a copy of it, which Inductor removes: `x[mask] = 0.0` before a branch passes such a copy to the branches."""
    inputs = program.graph_signature.input_specs
    weights = {spec.arg.name for spec in inputs if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)}
    numbers = [node for node in program.graph.nodes if node.name in weights and not node.meta["val"].dim()]
    readers = [user for node in numbers for user in node.users]
    for reader in readers:  # the list grows while it is read
        if torch.Tag.pointwise not in getattr(reader.target, "tags", ()):
            return True
        if reader.target is torch.ops.aten.clone.default:
            readers += reader.users
    return False


def _build_error(error: BaseException) -> BuildError | None:
    """Returns the BuildError inside an error of Inductor, or None."""
    return next((exception for exception in causes(error) if isinstance(exception, BuildError)), None)


def with_buffers(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Turns constants of the module into buffers, in place: torch 2.11 renames a tensor that is a plain attribute."""
    for node in module.graph.find_nodes(op="get_attr"):
        owner_name, _, name = str(node.target).rpartition(".")
        owner = module.get_submodule(owner_name)
        if isinstance(owner.__dict__.get(name), torch.Tensor):
            owner.register_buffer(name, owner.__dict__.pop(name), persistent=False)
    return module


def _with_copies(module: torch.fx.GraphModule, shared: Collection[int]) -> torch.fx.GraphModule:
    """Replaces the outputs at the positions `shared` by copies, in place."""
    if shared:
        output = module.graph.output_node()
        results = list(output.args[0])
        with module.graph.inserting_before(output):
            for index in shared:
                results[index] = module.graph.call_function(torch.ops.aten.clone.default, (results[index],))
        output.args = (tuple(results),)
        module.recompile()
    return module


def _make_reproducible(target: Path, work: Path) -> None:
    """Removes the bytes that differ from build to build: symbols named after files, the build id, and the paths in `__FILE__` of
    index checks.  Paths, and file names that Inductor derives from a hash of them, are replaced by text of the same length."""
    strip = shutil.which("strip")
    if strip is None:
        raise BuildError("compiler-failed", "`strip` is not on the PATH", "install binutils")
    subprocess.run([strip, "--strip-all", "--remove-section=.note.gnu.build-id", str(target)], check=True)
    data = target.read_bytes()
    for old, new in ((str(work), "/cgcompile"), (os.path.dirname(os.path.abspath(torch.__file__)), "/torch")):
        data = data.replace(old.encode(), new.encode().ljust(len(old.encode()), b"/")[: len(old.encode())])
    target.write_bytes(FILE_NAME.sub(b"/" + b"c" * 52 + b".", data))


@contextmanager
def _private_cache(folder: Path) -> Iterator[None]:
    """Puts Inductor's cache into a folder of this build, so that builds do not affect each other."""
    folder.mkdir(parents=True)
    old = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        if old is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = old


@contextmanager
def _watched(work: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Reports Inductor's progress from the files that it creates, because Inductor itself reports nothing."""
    done = threading.Event()

    def watch() -> None:
        reported = ""
        while not done.wait(0.25):
            names = {name for _, _, files in os.walk(work) for name in files}
            sources = [name for name in names if name.endswith(".cpp")]
            objects = sum(name.removesuffix("cpp") + "o" in names for name in sources)
            text = f"compiling C++, {objects} of {len(sources)} source files done" if sources else "generating code"
            if text != reported:
                reported = text
                tell(text)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
