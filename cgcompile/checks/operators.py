"""Rules about operators, at any size: PyTorch lists them, their authors tag them, the user names them, or they lack code."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from cgbundle.format.schema import Finding

from ..errors import CATALOGUE, BuildError, ModelError
from ..export.torch_program import arguments
from ..model.quantization.stored_weights import Quantization
from ..transforms.inlining import OURS, custom_operators, inlined
from ..util.disk_space import size
from .context import HOST, NOTE, REFUSE, RuleContext, all_calls, finding, operator

aten = torch.ops.aten

INCOMPATIBLE = frozenset({
    "aten.fused_moving_avg_obs_fake_quant.default",  # the form of the next two in an exported program
    "aten._fused_moving_avg_obs_fq_helper.default", "aten._fused_moving_avg_obs_fq_helper_functional.default",
    "fbgemm.dense_to_jagged.default", "fbgemm.jagged_to_padded_dense.default",
})  # fmt: skip
"""FORBIDDEN_CUDAGRAPH_OPS of torch/_inductor/utils.py (2.13; in 2.11 the list of get_first_incompatible_cudagraph_node), without
operators of other rules: reads of scalars, assertions, states of random generators."""

SYNCHRONIZING = {
    "aten.linalg_inv.default": "torch.linalg.inv_ex", "aten.inverse.default": "torch.linalg.inv_ex",
    "aten.linalg_solve.default": "torch.linalg.solve_ex", "aten.linalg_cholesky.default": "torch.linalg.cholesky_ex",
    "aten.cholesky.default": "torch.linalg.cholesky_ex", "aten.linalg_lu_factor.default": "torch.linalg.lu_factor_ex",
    "aten.linalg_eigh.default": "", "aten.linalg_eigvalsh.default": "", "aten.linalg_eig.default": "",
    "aten.linalg_eigvals.default": "", "aten.linalg_svd.default": "", "aten.linalg_svdvals.default": "",
}  # fmt: skip
"""Matrix functions that wait for the GPU to check for failure (`_linalg_check_errors` in ATen).  The value is the function that
does not wait, or "".  PyTorch's own lists do not contain them."""

DETERMINISTIC_SCATTER = frozenset({
    "aten._unsafe_index_put.default", "aten._unsafe_masked_index_put_accumulate.default", "aten.index_put.default",
    "aten.index_put_.default", "aten.scatter.src", "aten.scatter.reduce", "aten.scatter.value_reduce", "aten.scatter_add_",
    "aten.scatter_add_.default", "aten.scatter_add.default", "aten.scatter_reduce.two", "aten.scatter_reduce_.two",
    "aten.scatter_reduce.two_out", "aten.scatter_.src", "aten.scatter_.reduce", "aten.scatter_.value_reduce",
    "aten.index_add.default", "aten.index_add_.default",
})  # fmt: skip
"""Operators that PyTorch lists for deterministic algorithms, and their in-place variants."""

INDEX_PUTS = (aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default)

WITHOUT_CODE, WITHOUT_KERNEL = "operator-without-code", "operator-without-kernel"
"""Rules about operators without code for the host (`operators_without_code`), and without a Triton kernel for cross-compiling
(offline/lower/coverage.py)."""

PYTORCH = frozenset({"aten", "prim", "prims", "higher_order", "cgcompile", "inductor", "quantized_decomposed", "_c10d_functional"})
"""Namespaces of PyTorch's and cgcompile's operators.  Collectives have their own rule."""


def boolean_index_put(context: RuleContext) -> Iterable[Finding]:
    """An assignment through a mask: `x[mask] = values`.

    What it looks for: index_put with an index of dtype bool or uint8.
    Why CUDA forbids it: PyTorch converts the mask into indices with nonzero, and the CPU waits for their number.
    Effect: it runs on the host.  A mask with one number (`x[mask] = 0`) is a note: Inductor compiles it as a masked fill.
    Fix: `torch.where(mask, values, x)` with values of x's shape, or `x.masked_fill(mask, 0)`.
    Source: _fx_node_is_input_dependent_cudagraph_unsafe in utils.py, index_put_as_masked_fill in lowering.py of torch/_inductor.
    """
    for node, top in context.calls():
        if node.target not in INDEX_PUTS:
            continue
        operands = arguments(node)
        indices, value = [index for index in operands["indices"] if index is not None], operands["values"]
        masks = [index for index in indices if index.meta["val"].dtype in (torch.bool, torch.uint8)]
        if masks:
            filled = len(masks) == len(indices) == 1 and isinstance(value, Node) and value.meta["val"].dim() == 0
            yield finding(
                "boolean-index-put", NOTE if filled else HOST, "an assignment through a mask needs the indices of True", node,
                "it is lowered as a masked fill, which a graph holds" if filled else context.effect(top),
                "x.masked_fill(mask, value), or torch.where(mask, values, x)", top,
            )  # fmt: skip


def incompatible_operator(context: RuleContext) -> Iterable[Finding]:
    """An operator that fails under capture: observers of quantization, conversions of jagged tensors, matrix
    decompositions.

    What it looks for: the operators in the lists INCOMPATIBLE and SYNCHRONIZING.
    Why CUDA forbids it: they wait for the GPU, or allocate an amount of memory that depends on data.
    Effect: it runs on the host.  A matrix decomposition stops the build, because the code of a host region cannot call it.
    Fix: convert the quantized model (`convert_fx`, `convert_pt2e`); pad jagged tensors; use functions that do not wait, such as
    `torch.linalg.inv_ex`.
    Source: FORBIDDEN_CUDAGRAPH_OPS in torch/_inductor/utils.py; _linalg_check_errors in ATen's BatchLinearAlgebra.cpp.
    """
    for node, top in context.calls():
        if context.target == "cuda" and (other := SYNCHRONIZING.get(str(node.target))) is not None:
            yield finding(
                "incompatible-operator", REFUSE, f"{operator(node)} waits for the GPU to say whether it failed", node,
                "it cannot be captured, and a host region cannot call it",
                f"{other}(...) computes the same and does not wait" if other else "compute it outside, pass it as an input", top,
            )  # fmt: skip
        if str(node.target) in INCOMPATIBLE:
            yield finding(
                "incompatible-operator", HOST, f"{operator(node)} cannot be captured: PyTorch lists it", node, context.effect(top),
                "convert the model for inference, which removes the observers; pad instead of jagged tensors", top,
            )  # fmt: skip


def sparse_output(context: RuleContext) -> Iterable[Finding]:
    """A tensor that is not dense: sparse COO, CSR and similar layouts, nested, mkldnn.

    What it looks for: the layout of every value and constant of the program.
    Why CUDA forbids it: the number of stored elements depends on data, and the CPU waits for it.
    Effect: no bundle can be built: the memory plan and the copies between regions support dense tensors only.
    Fix: use dense tensors and masks.
    Source: is_cudagraph_unsafe_fx_node in torch/_inductor/utils.py (is_sparse of a value).
    """
    for node, top in context.calls():
        layouts = {leaf.layout for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)} - {torch.strided}
        if layouts:
            yield finding(
                "sparse-output", REFUSE, f"{operator(node)} gives a tensor of the layout {min(map(str, layouts))}", node,
                "memory can be planned for dense tensors only", "use dense tensors, and masks", top,
            )  # fmt: skip
    for node in context.program.graph.nodes:
        value, user = node.meta.get("val"), next(iter(node.users), None)
        if node.op == "placeholder" and user is not None and isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            yield finding(
                "sparse-output", REFUSE, f"{operator(user)} reads a tensor of the layout {value.layout}", user,
                "a bundle holds dense tensors", "make it dense: .to_dense()",
            )  # fmt: skip


def deterministic_scatter(context: RuleContext) -> Iterable[Finding]:
    """Scatters while `torch.use_deterministic_algorithms(True)` is set.

    What it looks for: the operators in the list DETERMINISTIC_SCATTER, if the option is set during the build.
    Why CUDA forbids it: the deterministic implementations sort and wait for the GPU.
    Effect: it runs on the host.
    Fix: turn deterministic algorithms off for the build, or write the scatter as a matrix product with a one-hot matrix.
    Source: get_first_incompatible_cudagraph_node in torch/_inductor/utils.py.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return
    for node, top in context.calls():
        if str(node.target) in DETERMINISTIC_SCATTER:
            yield finding(
                "deterministic-scatter", HOST, f"{operator(node)} under deterministic algorithms waits for the GPU", node,
                context.effect(top), "build without torch.use_deterministic_algorithms(True)", top,
            )  # fmt: skip


def cudagraph_unsafe(context: RuleContext) -> Iterable[Finding]:
    """An operator whose author tagged it as unsafe for CUDA graphs.

    What it looks for: the tag `torch.Tag.cudagraph_unsafe`.
    Why CUDA forbids it: such an operator waits for the GPU, allocates outside PyTorch's memory pools, or computes on the CPU.
    Effect: it runs on the host.
    Fix: if the operator can be captured, remove the tag.
    Source: torch.Tag.cudagraph_unsafe (tags.yaml); is_cudagraph_unsafe_fx_node in torch/_inductor/utils.py.
    """
    for node, top in context.calls():
        if torch.Tag.cudagraph_unsafe in getattr(node.target, "tags", ()):
            yield finding(
                "cudagraph-unsafe", HOST, f"{operator(node)} is tagged cudagraph_unsafe", node, context.effect(top),
                "take the tag off if the operator can be captured", top,
            )  # fmt: skip


def fallback_op(context: RuleContext) -> Iterable[Finding]:
    """An operator that the user keeps on the host with --fallback-op.

    What it looks for: calls of the named operators: `aten.topk` and `aten::topk` are all overloads, `aten.topk.default` is one.
    Why: the user knows that the operator cannot be captured, or wants to try it on the host.
    Effect: it runs on the host.
    Fix: leave the option out.
    Source: config.custom_should_partition_ops in torch/_inductor/config.py.
    """
    for node, top in context.calls():
        if any(spelled in _spellings(node) for spelled in _plain(context.fallback_ops)):
            yield finding(
                "fallback-op", HOST, f"{operator(node)} is kept on the host", node, context.effect(top),
                "leave --fallback-op out", top,
            )  # fmt: skip


def custom_operator(context: RuleContext) -> Iterable[Finding]:
    """An operator of another library.

    What it looks for: operators outside of PyTorch's namespaces.
    Why CUDA cares: it can be recorded only if it uses the current stream, does not wait for the GPU, allocates through PyTorch,
    and keeps no state.
    Effect: it is recorded.  The comparison of two recordings, and the replay at other addresses, detect violations.
    Fix: if it cannot be captured, tag it with `torch.Tag.cudagraph_unsafe`, or name it with --fallback-op.
    Source: the notes on custom operators in the torch.library documentation.
    """
    for node, top in context.calls():
        foreign = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in PYTORCH
        if foreign and node.target._schema.name not in OURS:
            yield finding(
                "custom-operator", NOTE, f"{operator(node)} is an operator of another library", node,
                "it is recorded: it must not wait for the GPU, nor allocate outside PyTorch",
                f"keep it on the host with --fallback-op {operator(node)} if it cannot be captured", top,
            )  # fmt: skip


def quantized_weights(context: RuleContext) -> Iterable[Finding]:
    """A model whose weights are stored in fewer bits than the dtype of its calls.

    What it looks for: the attribute `quantization` of the model, which `--weights int8` sets.
    Why: its results differ from those of the original weights.
    Effect: the self-test compares with eager PyTorch and the same quantized weights.  The finding gives the difference from the
    results of the original weights.
    Fix: none needed; without `--weights` the bundle has the original weights.
    Source: language_models/kernels/int8_network.py.
    """
    quantization = getattr(context.exported.source.model, "quantization", None)
    if isinstance(quantization, Quantization):
        sizes = f"{size(quantization.before)} became {size(quantization.after)}"
        yield finding(
            "quantized-weights", NOTE, f"weights are stored as {quantization.stored}: {sizes}; {quantization.error}", None,
            "the self-test compares with eager PyTorch over these weights",
            "none needed; leave --weights out to keep the original weights",
        )  # fmt: skip


def operators_without_code(program: ExportedProgram, on_host: Collection[str] | None = None) -> Iterable[Finding]:
    """Operators of other libraries that need Python at run time.

    What it looks for: operators that would run on the host, and whose code PyTorch cannot trace.
    Why: code for the host is compiled, and the serving process does not have the library's Python code.
    Effect: no bundle can be built.
    Fix: write it with torch.library.custom_op and PyTorch's own operations, or remove it from the model.
    Source: transforms/inlining.py, which traces the other operators.
    """
    # `on_host`: the names of the nodes that run on the host, None for all nodes
    foreign = {op for op in custom_operators(program) if op._schema.name not in OURS}  # PyTorch can trace ours
    if not foreign:
        return
    module = program.graph_module
    assert isinstance(module, torch.fx.GraphModule)
    seen = set()
    for node, top in all_calls(module):
        if node.target not in foreign or node.target in seen or (on_host is not None and top not in on_host):
            continue
        seen.add(node.target)
        try:
            inlined(program, {node.target})
        except ModelError as error:
            reason = str(error).partition(": ")[2]
            yield finding(
                WITHOUT_CODE, REFUSE, f"{operator(node)} {reason or 'needs Python'}", node, "no bundle can be built",
                CATALOGUE[WITHOUT_CODE].hint, top,
            )  # fmt: skip


def check_fallback_ops(programs: Sequence[ExportedProgram], fallback_ops: Sequence[str]) -> None:
    """Raises fallback-op-unknown for a name that no operation of the programs has."""
    spellings = {spelled for program in programs for node, _ in all_calls(program.graph_module) for spelled in _spellings(node)}
    for name, plain in zip(fallback_ops, _plain(fallback_ops), strict=True):
        if plain not in spellings:
            near = difflib.get_close_matches(plain, sorted(spellings), 3, 0.5)
            hint = f"it calls {', '.join(near)}" if near else "`cgcompile check` lists the operations of every region"
            raise BuildError("fallback-op-unknown", f"fallback-op {name!r}: the model calls no such operator", hint)


def _plain(names: Sequence[str]) -> list[str]:
    return [name.replace("::", ".") for name in names]


def _spellings(node: Node) -> set[str]:
    """Returns the names of an operation, such as `aten.topk` and `aten.topk.default`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return {str(node.target), str(node.target.overloadpacket)}
    return {node.target.name()} if isinstance(node.target, torch._ops.HigherOrderOperator) else set()
