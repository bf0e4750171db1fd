"""Calls operators without a C function in AOTInductor by name, through torch's dispatcher.

AOTInductor would call them through a *proxy executor*, an object of the serving process that needs torch's C++ classes.  The
generated code calls `torch_call_dispatcher` instead, a function of torch's stable C interface (torch/csrc/stable/c/shim.h, since
2.10).  It takes tensors, numbers, strings, devices, lists and optional values.  It does not take a `Scalar`, whose dtype is unknown
at compile time.  The operators in `BROKEN_C_FUNCTIONS`, whose C functions have a defect, are called through the dispatcher too.

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

TO_STABLE_VALUE = "torch::stable::detail::from"
"""The C++ function that converts a value to a `StableIValue`."""

CPU_DEVICE = "0xFFFFFFFFULL"
"""`StableIValue` of the device "cpu" without an index: type 0 in the upper half, -1 in the lower."""

BROKEN_C_FUNCTIONS = frozenset({"aten.histogram.bin_ct", "aten._histogramdd_from_bin_cts.default"})
"""Their C functions read an optional list of numbers after it was freed (torch 2.11: `pointer_to_optional_list` in
torch/csrc/inductor/aoti_torch/utils.h)."""

PATCHED_METHODS = (
    (CppWrapperCpu, "generate_fallback_kernel_with_runtime_lookup_aot"),
    (ir.FallbackKernel, "export_extern_kernel_node"),
)


@contextmanager
def fallbacks_through_dispatcher() -> Iterator[None]:
    """While active, makes Inductor generate calls through the dispatcher for operators without a usable C function.

    Raises torch-unsupported if this torch lacks a patched method.  While generating code, raises operator-without-code for an
    operator that cannot be called this way.
    """
    for owner, name in PATCHED_METHODS:
        if not hasattr(owner, name):
            raise BuildError(
                "torch-unsupported",
                f"torch {torch.__version__}: Inductor has no {owner.__name__}.{name}; cgcompile was tested with 2.11 and 2.13",
            )
    export_extern_kernel_node = ir.FallbackKernel.export_extern_kernel_node

    def checked_arguments(kernel: Any) -> Any:
        with patch.object(V.graph, "aot_mode", False):  # in this mode the kernel would be serialized for a proxy executor
            args = export_extern_kernel_node(kernel)
        _check_arguments(kernel, args)
        return args

    others = {name: row for name, row in inductor_fallback_ops.items() if name not in BROKEN_C_FUNCTIONS}
    with (
        patch.object(*PATCHED_METHODS[0], _generate_call),
        patch.object(*PATCHED_METHODS[1], checked_arguments),
        patch.dict(inductor_fallback_ops, others, clear=True),
        _suppress_warnings(),
    ):
        yield


@contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Suppresses Inductor's warnings about the proxy executor, and those of torch's CUDA builds about a missing GPU."""

    def keep(record: logging.LogRecord) -> bool:
        return not any(text in str(record.msg) for text in ("missing a c-shim implementation", "No CUDA runtime is found"))

    loggers = ir.log, logging.getLogger("torch.utils.cpp_extension")
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def _check_arguments(kernel: Any, args: Sequence[Any]) -> None:
    """Raises operator-without-code if the C interface does not support an argument."""
    schema = getattr(kernel.op_overload, "_schema", None)
    name = kernel.op_overload.name()
    if schema is None:
        reason = "it is not registered with torch's dispatcher"
    elif kernel.op_overload.namespace == "prims":
        reason = "torch implements it only in Python"
    elif missing := [
        argument for argument, value in zip(schema.arguments, args, strict=True) if value is not None and not _supported(argument)
    ]:
        reason = f"torch's C interface does not support {missing[0].type} (argument {missing[0].name!r})"
    else:
        return
    where, _ = place(kernel.get_origin_node())
    raise ModelError(
        "operator-without-code",
        f"{where or 'model'}: {name} cannot run without Python: {reason}",
        "replace the operation in the model",
    )


def _supported(argument: Any) -> bool:
    kind = argument.real_type
    while isinstance(kind, torch.OptionalType | torch.ListType):
        kind = kind.getElementType()
    return isinstance(kind, _NUMBERS | torch.TensorType | torch.StringType | torch.DeviceObjType) or repr(kind) in _ENUMERATIONS


_NUMBERS = torch.IntType | torch.SymIntType | torch.FloatType | torch.BoolType | torch.SymBoolType

_ENUMERATIONS = {"ScalarType": "dtype", "Layout": "layout", "MemoryFormat": "memory_format"}
"""Enumeration types of arguments, with their word in the names of C functions: "dtype" in `aoti_torch_dtype_float32`."""


def _generate_call(
    wrapper: Any, op: torch._ops.OpOverload, args: Sequence[Any], names: Sequence[Any], outputs: Sequence[Any]
) -> None:
    """Generates a call of `op`.  `args`: its arguments, which are buffers, expressions of sizes, or constants.

    `names`: C++ names of the results.  A list has a list of names, an unused result has None.  `outputs`: buffers of the
    results.  An `ir.MutationOutput` is a buffer that exists already.
    """
    wrapper.include_extra_header(HEADER)
    schema = op._schema
    if len(schema.returns) == 1 and isinstance(schema.returns[0].real_type, torch.ListType):
        names, outputs = [names], [outputs]
    before: list[str] = []
    values = [
        _stable_value(wrapper, value, argument.real_type, before) for value, argument in zip(args, schema.arguments, strict=True)
    ]
    stack = f"stack_{next(wrapper.arg_var_id)}"
    count = max(len(schema.arguments), len(schema.returns), 1)
    statements: list[str] = []
    tensor_names: list[str] = []
    new_names = [
        name if not isinstance(output, int | ir.MutationOutput) else None for name, output in zip(names, outputs, strict=False)
    ]
    for index, returned in enumerate(schema.returns):
        name = new_names[index] if index < len(new_names) else None
        _unpack_result(f"{stack}[{index}]", returned.real_type, name, f"{stack}_{index}", tensor_names, statements)
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


def _stable_value(wrapper: Any, value: Any, kind: Any, before: list[str]) -> str:
    """Returns a C++ expression of type `StableIValue`.  The call takes ownership of the value.  Appends the statements that must
    run first to `before`."""
    if isinstance(kind, torch.OptionalType):
        if value is None:
            return f"{TO_STABLE_VALUE}(std::nullopt)"
        return f"{TO_STABLE_VALUE}(std::optional<StableIValue>({_stable_value(wrapper, value, kind.getElementType(), before)}))"
    if isinstance(kind, torch.ListType):
        elements = [_stable_value(wrapper, element, kind.getElementType(), before) for element in value]
        return f"{TO_STABLE_VALUE}(std::vector<StableIValue>{{{', '.join(elements)}}})"
    if isinstance(kind, torch.TensorType):
        handle = f"boxed_{next(wrapper.arg_var_id)}"
        call = (
            f"aoti_torch_new_tensor_handle({value.codegen_reference()}, &{handle})"
            if hasattr(value, "codegen_reference")
            else f"{_number_as_tensor(value)}, &{handle})"
        )
        before += [f"AtenTensorHandle {handle};", f"AOTI_TORCH_ERROR_CODE_CHECK({call});"]
        return f"{TO_STABLE_VALUE}({handle})"
    if repr(kind) in _ENUMERATIONS or isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        start = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}[type(value)]
        return f"{TO_STABLE_VALUE}(aoti_torch_{start}_{str(value).removeprefix('torch.')}())"
    if isinstance(kind, torch.DeviceObjType):
        return CPU_DEVICE
    if isinstance(kind, torch.StringType):
        return f"{TO_STABLE_VALUE}(std::string({_quoted(value)}))"
    if isinstance(kind, torch.BoolType | torch.SymBoolType):
        return f"{TO_STABLE_VALUE}(static_cast<bool>({_expression(value)}))"
    ctype = "double" if isinstance(kind, torch.FloatType) else "int64_t"
    return f"{TO_STABLE_VALUE}(static_cast<{ctype}>({_expression(value)}))"


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
    """Returns the start of a C call that makes a 0-dimensional tensor, with the default dtype of a Python number."""
    if isinstance(value, complex):
        return f"aoti_torch_scalar_to_tensor_complex64(c10::complex<float>({_expression(value.real)}, {_expression(value.imag)})"
    name = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float32"
    return f"aoti_torch_scalar_to_tensor_{name}({_expression(value)}"


def _quoted(text: str) -> str:
    return '"' + "".join(char if char.isalnum() or char in " _-." else f"\\{ord(char):03o}" for char in text) + '"'


def _unpack_result(place: str, kind: Any, name: Any, prefix: str, tensor_names: list[str], statements: list[str]) -> None:
    """Appends statements to `statements`: they assign a result to its name, or free a result without a name.  Appends the names of
    tensors to `tensor_names`."""
    tensor = f"torch::stable::detail::to<AtenTensorHandle>({place})"
    if isinstance(kind, torch.ListType):
        handle, item = f"{prefix}_list", f"{prefix}_item"
        statements.append(f"auto {handle} = torch::stable::detail::to<StableListHandle>({place});")
        for index, element_name in enumerate(name or ()):
            statements += [
                f"StableIValue {item}_{index};",
                f"AOTI_TORCH_ERROR_CODE_CHECK(torch_list_get_item({handle}, {index}, &{item}_{index}));",
            ]
            _unpack_result(f"{item}_{index}", kind.getElementType(), element_name, f"{item}_{index}", tensor_names, statements)
        statements.append(f"AOTI_TORCH_ERROR_CODE_CHECK(torch_delete_list({handle}));")
    elif isinstance(kind, torch.TensorType):
        if name is None:
            statements.append(f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_delete_tensor_object({tensor}));")
        else:
            tensor_names.append(name)
            statements.append(f"{name}_handle = {tensor};")
