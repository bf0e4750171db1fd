"""Lowers a program at one int_key: retraces it for cuda, lowers it with Inductor, and records the launches of Inductor's Python
wrapper.  `fake_device` is active: no kernel is compiled or measured.

Private interfaces (torch 2.11, 2.13): `compile_fx_inner` and the `source_code` of its result, `user_visible_output_idxs` in the
metadata of a graph's output, `V.set_choices_handler`, `simd.prologue_preserves_zero_mask`, and the options below."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
from torch._inductor.codegen import simd
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.virtualized import V
from torch.export import ExportedProgram

from cgbundle.format.schema import IntKey

from ...errors import BuildError, ModelError, causes
from ...partition.blocks import has_conditionals
from ...partition.layers import has_equal_layers
from ...targets.architectures import Arch
from ...targets.compiler_errors import explain, source_operator
from ...transforms.few_rows.fewer_kernels import fewer_kernels
from ...transforms.inductor_passes import mended, passes, unchecked_puts
from ..decompose.constant_folding import fold
from ..decompose.device_program import host_hint, source_line
from ..decompose.outputs import same_layout
from ..decompose.retrace import Retraced, retrace
from ..decompose.split_k import SplitFactor, split_k
from ..lowered import BufferView, Lowered
from ..tuning.cost_model import choose as choose_candidate
from .control_flow import lower_blocks
from .fake_device import fake_device
from .kernel_analysis import analysed_once
from .launches import record_calls
from .template_configs import Choose, More, TemplateConfigs, nothing_more
from .variants import load

OPTIONS: dict[str, Any] = {
    # products and convolutions become Triton kernels, one candidate each
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "TRITON",
    "unroll_reductions_threshold": 9,  # fuses the sum over at most 8 parts of a split product into the kernel that reads it
    "max_autotune_conv_backends": "TRITON",
    "conv_1x1_as_mm": True,
    "triton.num_decompose_k_splits": 0,
    "triton.enable_persistent_tma_matmul": False,
    "benchmark_epilogue_fusion": False,
    "prologue_fusion": True,
    # disables measurements and caches of earlier runs
    "benchmark_kernel": False,
    "benchmark_fusion": False,
    "benchmark_combo_kernel": False,
    "combo_kernels": False,
    "coordinate_descent_tuning": False,
    "shape_padding": False,
    "triton.multi_kernel": 0,
    "triton.cooperative_reductions": False,
    "triton.mix_order_reduction": False,
    "triton.autotune_at_compile_time": False,
    "freezing": False,
    "force_disable_caches": True,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,
    "autotune_remote_cache": False,
    "bundle_triton_into_fx_graph_cache": False,
    "compile_threads": 1,
    # one wrapper that only launches kernels
    "cpp_wrapper": False,
    "fx_wrapper": False,
    "graph_partition": False,
    "triton.cudagraphs": False,
    "memory_planning": False,
    "allow_buffer_reuse": False,  # separate buffers have shorter lifetimes, which helps the arena plan
    "use_static_cuda_launcher": False,
    "use_static_triton_launcher": False,
    "size_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
    "scalar_asserts": False,
    "profiler_mark_wrapper_call": False,
    "implicit_fallbacks": True,
}
"""Inductor's options.  Options that a version does not have are omitted."""


def lower_key(
    program: ExportedProgram,
    key: IntKey,
    tensors: Sequence[torch.Tensor],
    arch: Arch,
    *,
    layouts: Sequence[tuple[int, ...] | None] = (),
    writes: bool = False,
    live: Collection[str] = (),
    choose: Choose = choose_candidate,
    more: More = nothing_more,
    split_factor: SplitFactor = lambda problem: 1,
) -> Lowered:
    """Lowers `program` for `arch` at the sizes of `tensors`, the call's tensors on the CPU.  `layouts`: the dense strides that each
    output must have, or None; () if none is fixed.  `writes`: the program writes to buffers or inputs.  `live`: weights that may
    change between calls.  `choose` picks configurations of matrix products and convolutions from Inductor's and from `more`.  Equal
    arguments give equal results in every process.

    Raises operator-without-kernel, random-operation, state-shared, constant-unknown, inputs-unlike, lowering-broken,
    torch-unsupported, gpu-visible.
    """
    with fake_device(arch), analysed_once():
        weights = {
            name: value for name, value in {**program.state_dict, **program.constants}.items() if isinstance(value, torch.Tensor)
        }

        def lower(retraced: Retraced, layout: Sequence[tuple[int, ...] | None]) -> Lowered:
            folded, constants = fold(retraced, weights, live)
            folded = split_k(folded, arch.name, split_factor)
            lowered, unknown = lower_graph(folded, key, arch, layout, choose, more)
            _check_known(unknown, key, folded)
            outputs = _with_strides(lowered.outputs, layout, key)
            return replace(lowered, outputs=outputs, constants=constants, written=retraced.written)

        if has_conditionals(program.graph_module) or (not writes and has_equal_layers(program.graph_module)):
            return lower_blocks(program, key, tensors, layouts, lower, live)
        return lower(retrace(program, tensors, layouts, writes=writes), layouts)


def _check_known(unknown: Sequence[str], key: IntKey, retraced: Retraced) -> None:
    """Raises operator-without-kernel if the wrapper makes calls that are no Triton kernels."""
    if unknown:
        origins = [_origin(name, retraced) for name in unknown]
        raise ModelError(
            "operator-without-kernel",
            f"int_key {key}: no Triton kernel for {', '.join([text for text, _ in origins])}",
            host_hint([operator for _, operators in origins for operator in operators]),
        )


def lower_graph(
    retraced: Retraced,
    key: IntKey,
    arch: Arch,
    layouts: Sequence[tuple[int, ...] | None],
    choose: Choose,
    more: More = nothing_more,
) -> tuple[Lowered, tuple[str, ...]]:
    """Lowers a retraced graph inside `fake_device`.  Returns the result and the names of calls that are no Triton kernels."""
    handler = TemplateConfigs(arch, choose, more)
    available = torch._inductor.config.get_config_copy()
    options = {name: value for name, value in OPTIONS.items() if name in available} | passes() | fewer_kernels(ahead=False)
    # A fused prologue loads a factor of a product with a mask, but without a value for masked elements.  Inductor assumes that they
    # are zero.  If the prologue maps zero to zero, it adds no tl.where.  In Triton they are undefined, and nan times zero is nan.
    masked = mock.patch.object(simd, "prologue_preserves_zero_mask", lambda prologue: False)
    with (
        torch._inductor.config.patch(options), V.set_choices_handler(handler), masked, mended(), torch.no_grad(),
        unchecked_puts(retraced.program),
        warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # `exact_products` sets the precision of float32 products
        wrapper = _wrapper(retraced, key, layouts)
        return record_calls(key, wrapper, retraced.tensors, retraced.names, lambda source: load(source, handler.selected))


def _wrapper(retraced: Retraced, key: IntKey, layouts: Sequence[tuple[int, ...] | None]) -> str:
    """Returns the Python code that launches a graph's kernels."""
    placeholders = [node for node in retraced.graph.graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in retraced.graph.graph.nodes if node.op == "output"]
    if not any(node.op == "call_function" for node in retraced.graph.graph.nodes):
        return f"def call(args): return [args[i] for i in {[placeholders.index(node) for node in output.args[0]]}]"
    fixed = [index for index, strides in enumerate(layouts) if strides is not None]
    output.meta["user_visible_output_idxs"] = fixed  # Inductor may pad other outputs or make them channels-last
    inputs = list(retraced.tensors)
    try:
        return compile_fx_inner(retraced.graph, inputs, static_input_idxs=range(len(inputs)), is_inference=True).source_code
    except Exception as error:  # a compiler may raise any exception
        raise _explain(error, key, retraced) from error


def _with_strides(
    outputs: tuple[BufferView, ...], layouts: Sequence[tuple[int, ...] | None], key: IntKey
) -> tuple[BufferView, ...]:
    """Returns the outputs with the strides of `layouts`.  Inductor's strides may differ only for axes with one element.  Raises
    lowering-broken."""
    if not layouts:
        return outputs
    views = []
    for number, (tensor, layout) in enumerate(zip(outputs, layouts, strict=True)):
        strides = tensor.strides if layout is None else layout
        if not same_layout(tensor.shape, tensor.strides, strides):
            raise BuildError(
                "lowering-broken",
                f"int_key {key}: output {number} of Inductor's code has strides {tensor.strides}, expected {strides}",
            )
        views.append(replace(tensor, strides=strides))
    return tuple(views)


def _explain(error: Exception, key: IntKey, retraced: Retraced) -> BuildError:
    """Returns the BuildError among the causes, or an error for an operation without a lowering, or for a failure of Inductor."""
    for cause in causes(error):
        if isinstance(cause, BuildError):
            return cause
        if type(cause).__name__ in ("NoValidChoicesError", "MissingOperatorWithoutDecomp", "MissingOperatorWithDecomp"):
            target = re.search(r"target: ([\w.]+)", str(error))
            text, operators = _origin(target[1], retraced) if target else ("an operation", [])
            return ModelError("operator-without-kernel", f"int_key {key}: no Triton kernel for {text}", host_hint(operators))
    failure = explain(error, retraced.program)
    return BuildError("lowering-broken", f"int_key {key}: {failure}", failure.hint("eager"))


def _origin(name: str, retraced: Retraced) -> tuple[str, list[str]]:
    """Returns the name of a call with the user's line, and the program's operators that it comes from."""
    plain = re.sub(r"^(torch\.ops\.|extern_kernels\.)", "", name)
    stem = plain.removesuffix(".default").removeprefix("aten.")
    nodes = [n for n in retraced.graph.graph.nodes if n.op == "call_function" and stem in str(n.target)]
    where = next((line for node in nodes if (line := source_line(node))), "")
    return f"{plain}{f' ({where})' if where else ''}", [source_operator(node, [retraced.program]) for node in nodes]
