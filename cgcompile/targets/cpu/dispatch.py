"""Operators without a C function in AOTInductor are called by name, through torch's dispatcher.

AOTInductor would leave them to a *proxy executor*, an object of the serving process that needs torch's C++ classes.  The generated
code calls `torch_call_dispatcher` instead, a function of torch's stable C interface (torch/csrc/stable/c/shim.h, since 2.10).  It
takes tensors, numbers, strings, devices, lists and optional values, but no `Scalar`, which may be any kind of number.  The
operators `MISREAD`, whose C functions are wrong, are called in the same way.

Private interfaces (torch 2.11, 2.13): `CppWrapperCpu.generate_fallback_kernel_with_runtime_lookup_aot`,
`FallbackKernel.export_extern_kernel_node`, `cexpr`, the table of `torchgen.aoti.fallback_ops`, and
torch/csrc/stable/stableivalue_conversions.h in the generated code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import ir
from torch._inductor.codegen.cpp_utils import cexpr
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.virtualized import V
from torchgen.aoti.fallback_ops import inductor_fallback_ops

from ...errors import BuildError, ModelError
from ...model.user_code import place

HEADER = "torch/csrc/stable/stableivalue_conversions.h"

BOXED = "torch::stable::detail::from"

CPU = "0xFFFFFFFFULL"
"""`StableIValue` of the device "cpu" without an index: type 0 in the upper half, -1 in the lower."""

MISREAD = frozenset({"aten.histogram.bin_ct", "aten._histogramdd_from_bin_cts.default"})
"""Their C functions read an optional list of numbers after it was freed (torch 2.11: `pointer_to_optional_list` in
torch/csrc/inductor/aoti_torch/utils.h)."""

METHODS = ((CppWrapperCpu, "generate_fallback_kernel_with_runtime_lookup_aot"), (ir.FallbackKernel, "export_extern_kernel_node"))


@contextmanager
def dispatched() -> Iterator[None]:
    """Makes the code that Inductor generates while active call such operators through the dispatcher.

    Raises torch-unsupported if this torch lacks a patched method.  While generating code, raises operator-without-code for an
    operator that cannot be called this way.
    """
    for owner, name in METHODS:
        if not hasattr(owner, name):
            raise BuildError(
                "torch-unsupported",
                f"torch {torch.__version__}: Inductor has no {owner.__name__}.{name}; cgcompile was tested with 2.11 and 2.13",
            )
    plain = ir.FallbackKernel.export_extern_kernel_node

    def arguments(kernel: Any) -> Any:
        with patch.object(V.graph, "aot_mode", False):  # else the kernel is serialized for a proxy executor
            args = plain(kernel)
        _refuse_unboxed(kernel, args)
        return args

    others = {name: row for name, row in inductor_fallback_ops.items() if name not in MISREAD}
    with (
        patch.object(*METHODS[0], _call),
        patch.object(*METHODS[1], arguments),
        patch.dict(inductor_fallback_ops, others, clear=True),
        _quiet(),
    ):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses Inductor's warnings about the proxy executor, and those of torch's CUDA builds about a missing GPU."""

    def other(record: logging.LogRecord) -> bool:
        return not any(text in str(record.msg) for text in ("missing a c-shim implementation", "No CUDA runtime is found"))

    loggers = ir.log, logging.getLogger("torch.utils.cpp_extension")
    for logger in loggers:
        logger.addFilter(other)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(other)


def _refuse_unboxed(kernel: Any, args: Sequence[Any]) -> None:
    """Raises operator-without-code if the C interface does not support an argument."""
    schema = getattr(kernel.op_overload, "_schema", None)
    name = kernel.op_overload.name()
    if schema is None:
        reason = "it is no operator of torch's dispatcher"
    elif kernel.op_overload.namespace == "prims":
        reason = "torch makes it known in Python alone"
    elif missing := [
        argument for argument, value in zip(schema.arguments, args, strict=True) if value is not None and not _takes(argument)
    ]:
        reason = f"torch's C interface passes no {missing[0].type} (its argument {missing[0].name!r})"
    else:
        return
    where, _ = place(kernel.get_origin_node())
    raise ModelError(
        "operator-without-code",
        f"{where or 'model'}: {name} has no code that runs without Python: {reason}",
        "replace the operation in the model",
    )


def _takes(argument: Any) -> bool:
    kind = argument.real_type
    while isinstance(kind, torch.OptionalType | torch.ListType):
        kind = kind.getElementType()
    return isinstance(kind, _NUMBERS | torch.TensorType | torch.StringType | torch.DeviceObjType) or repr(kind) in _ENUMERATIONS


_NUMBERS = torch.IntType | torch.SymIntType | torch.FloatType | torch.BoolType | torch.SymBoolType

_ENUMERATIONS = {"ScalarType": "dtype", "Layout": "layout", "MemoryFormat": "memory_format"}
"""Enumeration types of arguments, and their part of the C function's name for a value: `aoti_torch_dtype_float32`."""


def _call(wrapper: Any, op: torch._ops.OpOverload, args: Sequence[Any], names: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Generates the call of `op` with the arguments `args`: buffers, expressions and plain values.

    `names`: the names of its results, a list for a list, None for a result that nobody reads.  `outputs`: their buffers; buffers of
    mutations exist already.
    """
    wrapper.include_extra_header(HEADER)
    schema = op._schema
    if len(schema.returns) == 1 and isinstance(schema.returns[0].real_type, torch.ListType):
        names, outputs = [names], [outputs]
    before: list[str] = []
    values = [_boxed(wrapper, value, argument.real_type, before) for value, argument in zip(args, schema.arguments, strict=True)]
    stack = f"stack_{next(wrapper.arg_var_id)}"
    count = max(len(schema.arguments), len(schema.returns), 1)
    statements: list[str] = []
    tensor_names: list[str] = []
    fresh = [
        name if not isinstance(output, int | ir.MutationOutput) else None for name, output in zip(names, outputs, strict=False)
    ]
    for index, returned in enumerate(schema.returns):
        name = fresh[index] if index < len(fresh) else None
        _take(f"{stack}[{index}]", returned.real_type, name, f"{stack}_{index}", tensor_names, statements)
    wrapper.writelines([f"AtenTensorHandle {name}_handle = nullptr;" for name in tensor_names])
    wrapper.writelines(
        [
            "{",
            *before,
            f"StableIValue {stack}[{count}] = {{{', '.join(values)}}};",
            f'AOTI_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("{schema.name}", "{schema.overload_name}", {stack}, '
            "TORCH_ABI_VERSION));",
            *statements,
            "}",
        ]
    )
    wrapper.writelines([f"RAIIAtenTensorHandle {name}({name}_handle);" for name in tensor_names])


def _boxed(wrapper: Any, value: Any, kind: Any, before: list[str]) -> str:
    """Returns a C++ expression of type `StableIValue`, which the call will own.  Adds the statements for it to `before`."""
    if isinstance(kind, torch.OptionalType):
        if value is None:
            return f"{BOXED}(std::nullopt)"
        return f"{BOXED}(std::optional<StableIValue>({_boxed(wrapper, value, kind.getElementType(), before)}))"
    if isinstance(kind, torch.ListType):
        elements = [_boxed(wrapper, element, kind.getElementType(), before) for element in value]
        return f"{BOXED}(std::vector<StableIValue>{{{', '.join(elements)}}})"
    if isinstance(kind, torch.TensorType):
        handle = f"boxed_{next(wrapper.arg_var_id)}"
        call = (
            f"aoti_torch_new_tensor_handle({value.codegen_reference()}, &{handle})"
            if hasattr(value, "codegen_reference")
            else f"{_number_as_tensor(value)}, &{handle})"
        )
        before += [f"AtenTensorHandle {handle};", f"AOTI_TORCH_ERROR_CODE_CHECK({call});"]
        return f"{BOXED}({handle})"
    if repr(kind) in _ENUMERATIONS or isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        start = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}[type(value)]
        return f"{BOXED}(aoti_torch_{start}_{str(value).removeprefix('torch.')}())"
    if isinstance(kind, torch.DeviceObjType):
        return CPU
    if isinstance(kind, torch.StringType):
        return f"{BOXED}(std::string({_quoted(value)}))"
    if isinstance(kind, torch.BoolType | torch.SymBoolType):
        return f"{BOXED}(static_cast<bool>({_expression(value)}))"
    ctype = "double" if isinstance(kind, torch.FloatType) else "int64_t"
    return f"{BOXED}(static_cast<{ctype}>({_expression(value)}))"


def _expression(value: Any) -> str:
    """Returns a number, or an expression of sizes, as C++."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "std::numeric_limits<double>::quiet_NaN()" if value != value else _finite(value)
    return str(cexpr(getattr(getattr(value, "node", None), "expr", value)))


def _finite(value: float) -> str:
    limit = "std::numeric_limits<double>::infinity()"
    return limit if value == float("inf") else f"-{limit}" if value == -float("inf") else repr(value)


def _number_as_tensor(value: Any) -> str:
    """Returns the start of a C call that makes a tensor of no dimensions, with the default dtype of a Python number."""
    if isinstance(value, complex):
        return f"aoti_torch_scalar_to_tensor_complex64(c10::complex<float>({_expression(value.real)}, {_expression(value.imag)})"
    name = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float32"
    return f"aoti_torch_scalar_to_tensor_{name}({_expression(value)}"


def _quoted(text: str) -> str:
    return '"' + "".join(char if char.isalnum() or char in " _-." else f"\\{ord(char):03o}" for char in text) + '"'


def _take(place: str, kind: Any, name: Any, prefix: str, tensor_names: list[str], statements: list[str]) -> None:
    """Adds `statements` that name a result, or free one without a name.  Adds the names to `tensor_names`."""
    tensor = f"torch::stable::detail::to<AtenTensorHandle>({place})"
    if isinstance(kind, torch.ListType):
        handle, item = f"{prefix}_list", f"{prefix}_item"
        statements.append(f"auto {handle} = torch::stable::detail::to<StableListHandle>({place});")
        for index, element_name in enumerate(name or ()):
            statements += [
                f"StableIValue {item}_{index};",
                f"AOTI_TORCH_ERROR_CODE_CHECK(torch_list_get_item({handle}, {index}, &{item}_{index}));",
            ]
            _take(f"{item}_{index}", kind.getElementType(), element_name, f"{item}_{index}", tensor_names, statements)
        statements.append(f"AOTI_TORCH_ERROR_CODE_CHECK(torch_delete_list({handle}));")
    elif isinstance(kind, torch.TensorType):
        if name is None:
            statements.append(f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_delete_tensor_object({tensor}));")
        else:
            tensor_names.append(name)
            statements.append(f"{name}_handle = {tensor};")
