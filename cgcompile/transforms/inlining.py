"""Replaces operators that the code of a host region cannot call by the operations of their implementations.

That code runs without Python, but custom operators need Python.  So operators that PyTorch can trace are traced; others are
refused.  SPELLED has implementations of PyTorch's operators without a C interface in AOTInductor.

Private interfaces (torch 2.11, 2.13): `torch._library.custom_ops`, for the Python functions behind `torch.library.custom_op`;
`torch.library._impls`, the names of operators and devices for which `torch.library.impl` registered a Python function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
import torch._library.custom_ops as custom_ops
from torch import Tensor
from torch.export import ExportedProgram

from ..errors import BuildError, ModelError
from ..export.programs import Programs
from ..model.source import Source
from ..model.user_code import first_line, is_user_file

OWN = frozenset({"aten", "prims", "prim", "quantized", "cgcompile"})
"""Namespaces of operators that PyTorch or cgcompile registers."""

OURS = frozenset({"language_model::int8_linear", "language_model::paged_attention"})
"""cgcompile's operators that bundles for processors call as C++ (targets/kernels/operators.py).  Elsewhere they are traced."""


def inlined(program: ExportedProgram, only: Collection[Any] | None = None) -> ExportedProgram:
    """Replaces the operators that need Python at run time, or only those in `only`.  Raises operator-without-code,
    torch-unsupported."""
    if any(node.target in SPELLED for node in program.graph.nodes):
        program = program.run_decompositions(dict(SPELLED))
    excluded = set() if only is None else custom_operators(program) - set(only)
    for _ in range(8):  # an operator may call others
        operators = custom_operators(program) - excluded
        if not operators:
            return program
        try:
            program = program.run_decompositions({op: _function(op) for op in operators})
        except ModelError:
            raise
        except Exception as error:
            names = ", ".join(sorted(op.name() for op in operators))
            raise ModelError(
                "operator-without-code",
                f"{names}: runs on the host without Python, and its code cannot be traced: {first_line(error)}",
            ) from error
    raise ModelError("operator-without-code", f"{', '.join(sorted(op.name() for op in custom_operators(program)))}: calls itself")


def unique(x: Tensor, sorted: bool = True, inverse: bool = False, counts: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Implements `torch.unique` of all elements: sorted values, the position of each element among them, and their counts."""
    ordered, order = torch.sort(x.reshape(-1), stable=True)
    values, positions, sizes = unique_consecutive(ordered, True, True)
    unsorted = torch.empty_like(order).scatter(0, order, positions) if inverse else x.new_empty(0, dtype=torch.int64)
    return values, unsorted.reshape(x.shape) if inverse else unsorted, sizes if counts else x.new_empty(0, dtype=torch.int64)


def unique_consecutive(
    x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements `torch.unique_consecutive` of all elements.  Returns NotImplemented for one axis of several."""
    if dim is not None and x.dim() != 1:
        return NotImplemented
    flat = x.reshape(-1)
    first = torch.cat([flat.new_ones(1, dtype=torch.bool), flat[1:] != flat[:-1]]) if flat.numel() else flat.to(torch.bool)
    starts = torch.nonzero(first).reshape(-1)
    positions = (torch.cumsum(first.to(torch.int64), 0) - 1).reshape(x.shape)
    ends = torch.cat([starts, starts.new_full((1,), flat.numel())])
    empty = x.new_empty(0, dtype=torch.int64)
    return flat[starts], positions if inverse else empty, ends[1:] - ends[:-1] if counts else empty


def bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Implements `torch.bincount`.  `x` must have at least one element."""
    size = torch.clamp(x.max() + 1, min=minlength).item()
    torch._check(size >= 0)
    ones = torch.ones_like(x) if weights is None else weights.to(torch.float64 if weights.dtype != torch.float32 else torch.float32)
    return torch.zeros(size, dtype=ones.dtype).scatter_add(0, x.to(torch.int64), ones)


SPELLED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._unique2.default: unique,
    torch.ops.aten.unique_consecutive.default: unique_consecutive,
    torch.ops.aten.bincount.default: bincount,
}
"""PyTorch's operators without a C interface in AOTInductor (torch 2.13: its fallback calls them through Python)."""


LOWERED = frozenset(
    f"quantized_decomposed::{name}"
    for name in ("quantize_per_tensor", "dequantize_per_tensor", "quantize_per_channel", "dequantize_per_channel", "choose_qparams")
)
"""Operators with Python code for which Inductor has lowerings (torch/_inductor/lowering.py, 2.11 and 2.13): PT2E uses them."""


def custom_operators(program: ExportedProgram) -> set[Any]:
    """Returns the operators of other libraries that a program calls, except those that Inductor lowers."""
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = {node.target for module in modules for node in module.graph.nodes if node.op == "call_function"}
    calls = {op for op in targets if isinstance(op, torch._ops.OpOverload) and op.namespace not in OWN}
    return {op for op in calls if op._schema.name not in LOWERED}


PROCESSOR = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _has_python_code(op: Any) -> bool:
    """Whether `torch.library.impl` registered a Python function that runs for the CPU."""
    names = getattr(torch.library, "_impls", ())
    name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    keys = [key for key in ("CPU", "CompositeExplicitAutograd") if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]
    return bool(keys) and f"{op.namespace}/{name.partition('::')[2]}/{keys[0]}" in names


def code_of(source: Source, programs: Programs) -> str:
    """Returns the files and modules that another process must import before it loads the programs, one a line: the model's, and
    those that register a custom operator, because the model may import them late.  Returns "" if the programs call no custom
    operator.  Raises operator-without-code."""
    operators = {operator for _, program in programs.distinct for operator in custom_operators(program)}
    modules = {module for operator in operators for module in _registering_modules(operator)} - {source.code}
    if operators and not source.code and not modules:
        names = ", ".join(sorted(op.name() for op in operators))
        raise ModelError(
            "operator-without-code",
            f"{names}: registered where the processes of a build cannot import it",
            "put the model and its operators into a file of their own",
        )
    return "\n".join(filter(None, [source.code, *sorted(modules)])) if operators else ""


def _registering_modules(op: Any) -> list[str]:
    """Returns the importable modules that may have registered an operator: those in the packages of its functions whose source
    contains the operator's namespace.  `torch.library.impl` keeps no function; then those whose source contains its name."""
    impl = getattr(custom_ops, "OPDEFS", {}).get(f"{op.namespace}::{op._opname}")
    functions = [getattr(impl, "_init_fn", None), getattr(impl, "_abstract_fn", None), *getattr(impl, "_backend_fns", {}).values()]
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items() if name != "__main__"}
    if impl is None:
        candidates = [(name, Path(file)) for name, file in files.items() if file.endswith(".py") and is_user_file(file)]
        texts = [(name, file.read_bytes()) for name, file in candidates if file.is_file()]
        return [name for name, text in texts if b"torch.library" in text and op._opname.encode() in text]
    packages = {getattr(function, "__module__", "").partition(".")[0] for function in functions} - {"", "torch", "builtins"}
    packages = {package for package in packages if PathFinder.find_spec(package) is not None}
    sources = [(name, Path(file)) for name, file in files.items() if name.partition(".")[0] in packages and file.endswith(".py")]
    return [name for name, file in sources if file.is_file() and op.namespace.encode() in file.read_bytes()]


def _function(op: Any) -> Callable[..., Any]:
    """Returns the function that the operator's author registered for the CPU, or for every device, in Python."""
    if not hasattr(custom_ops, "OPDEFS"):
        raise BuildError(
            "torch-unsupported",
            f"torch {torch.__version__} has no OPDEFS, where cgcompile finds the functions of custom operators; "
            "cgcompile was tested with 2.11 and 2.13",
        )
    impl = custom_ops.OPDEFS.get(f"{op.namespace}::{op._opname}")
    backend_fns = getattr(impl, "_backend_fns", {})
    function: Callable[..., Any] | None = backend_fns.get("cpu") or backend_fns.get(None)
    if function is None and _has_python_code(op):
        return lambda *args, **kwargs: op.redispatch(PROCESSOR, *args, **kwargs)
    if function is None:
        raise ModelError(
            "operator-without-code",
            f"{op.name()}: runs on the host without Python, and PyTorch cannot trace its code for the CPU",
        )
    return function
