"""PyTorch's verdict on a case: what its compiler reports about CUDA graphs.  It runs on a machine without a GPU.

The model takes PyTorch's path, not cgcompile's.  Under `cgcompile.offline.lower.fake_device`, its weights and inputs become fake
cuda tensors.  `torch.export` traces the user's module, AOTAutograd makes it functional (`aot_export_module`), Inductor lowers it
(`compile_fx_inner`).  The functions below are called just before the scheduler would fuse operations.  So `.cpu()` in the user's
code is a copy here, whatever cgcompile's export does with it.

With torch 2.11 and 2.13 the following private functions are called:
- `torch._inductor.utils.get_first_incompatible_cudagraph_node`: forbidden operators, `cudagraph_unsafe` tags, boolean index_put,
  sparse outputs, unbacked symbols.  It returns only the first node, so it is called again for the following ones.
- `torch._inductor.scheduler.Scheduler.should_partition` for every operation, through the option `_pre_fusion_custom_pass`, with
  `triton.cudagraphs` and `graph_partition` on.
- `GraphLowering.disable_cudagraphs_reason`: the reason of the lowering itself.
- `torch._inductor.cudagraph_utils`: `check_for_mutation`, `check_for_mutation_ignore_cuda_graph_managed_tensor` and
  `check_multiple_devices_or_any_cpu_nodes`, and `get_input_storage_mutation_info` with its reason if this torch has it.
- `torch._dynamo.backends.cudagraphs.check_for_skip`, the verdict of the `cudagraphs` backend.

A torch without CUDA has no sparse cuda tensors.  A model with sparse tensors is traced on the CPU, with the first function only.

Two checks are not called.  One is that all inputs are tensors: it is part of `CompiledFxGraph.post_compile`, and numbers in a call
are constants of the exported graph.  The other is `check_caching_allocator_for_cudagraphs`, which needs a real GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch._dynamo.backends.cudagraphs import check_for_skip
from torch._functorch.aot_autograd import aot_export_module
from torch._inductor import cudagraph_utils
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, UnsupportedOperatorException
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_map_only

from cgcompile.model.load import load_source
from cgcompile.model.source import sample
from cgcompile.model.user_code import first_line, is_user_file
from cgcompile.offline.lower.fake_device import fake_device
from cgcompile.targets.architectures import arch

from .case import SIZES, Case
from .cgcompile_says import short
from .settings import settings

OPTIONS = {
    "triton.cudagraphs": True,
    "graph_partition": True,
    "fallback_random": True,  # otherwise random operations need a pass over a graph with gradients
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "compile_threads": 1,
    "shape_padding": False,  # padding would run benchmarks
}

UNTRACED: tuple[tuple[type[Exception], str], ...] = (
    (GuardOnDataDependentSymNode, ""),
    (DataDependentOutputException, ""),
    (UnsupportedOperatorException, ""),
    (RuntimeError, "There was no fake impl registered"),
    (RuntimeError, "does not support tracing"),
    (ValueError, "batch_sizes should always be on CPU"),
    (AssertionError, "NYI: aten._pin_memory"),
)
"""Errors that stop a trace, so that torch.compile leaves that part to Python: a branch on data, an operator without a fake
implementation, nested tensors, packed sequences, pinned memory. Each row is an error class and a part of its message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """Something that PyTorch keeps out of CUDA graphs: the function that flags it, its text, and the user's lines of the operation
    ("file.py:line"; none if the whole graph is meant)."""

    by: str
    reason: str
    lines: frozenset[str]


def pytorch_says(case: Case) -> tuple[Flag, ...]:
    """Returns all flags for `case`; none if PyTorch would record the whole model as one CUDA graph."""
    with settings(case.deterministic), fake_device(arch("sm_90")):
        try:
            program = _traced(case, "cuda")
        except NotImplementedError as error:
            if "Could not run" not in str(error):
                raise
            return tuple(_incompatible(_traced(case, "cpu").graph_module))  # sparse tensors
        except tuple([kind for kind, _ in UNTRACED]) as error:
            if not any(isinstance(error, kind) and words in str(error) for kind, words in UNTRACED):
                raise
            return (Flag(by="torch.export", reason=first_line(error), lines=frozenset(_raised_in(error))),)
        graph, inputs, static = _inductor_form(program)
        skipped = check_for_skip(graph, len(static))  # on the graph before Inductor changes it
        nodes, lowering = _lowered(graph, inputs, static)
        return (*_incompatible(lowering.module), *nodes, *_whole(lowering, graph, inputs, static, skipped))


# --- the model as Inductor gets it ----------------------------------------------------------------------------


def _traced(case: Case, device: str) -> ExportedProgram:
    """Exports the user's module with fake tensors."""
    model, inputs = case.make()
    source = load_source(model, inputs)
    example = sample(source, dict.fromkeys(source.dimensions, SIZES[0]))
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        _move(model, device)
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: _like(tensor, device), (example.args, example.kwargs))
    return torch.export.export(model, args, kwargs, strict=False)


def _move(model: nn.Module, device: str) -> None:
    """Moves parameters and buffers as model.to(device) does; tensors in other attributes stay."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(_like(weight.data, device), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _like(buffer, device)


def _like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _inductor_form(program: ExportedProgram) -> tuple[torch.fx.GraphModule, list[Any], list[int]]:
    """Returns the graph, example inputs and positions of weights in the form that AOTAutograd passes to Inductor. Writes are copies
    to the placeholders at the end of the graph, and literals are attributes."""
    specs = program.graph_signature.input_specs
    values = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    with torch._functorch.config.patch(unlift_effect_tokens=True):
        graph, signature = aot_export_module(program.graph_module, values, trace_joint=False, decompositions=select_decomp_table())
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, values, strict=True):
        node.meta.setdefault("val", value)  # numbers have no "val"
    (output,) = graph.graph.find_nodes(op="output")
    written = signature.user_inputs_to_mutate
    by_name = {node.name: node for node in placeholders}
    with graph.graph.inserting_before(output):
        for value in output.args[0][: len(written)]:
            copied = graph.graph.call_function(torch.ops.aten.copy_.default, (by_name[written[value.name]], value))
            copied.meta = dict(value.meta)
    output.args = (tuple(output.args[0][len(written) :]),)
    for spec, node in zip(specs, placeholders, strict=True):
        if spec.kind == InputKind.CONSTANT_TENSOR:
            setattr(graph, node.name, program.constants[spec.target])
            with graph.graph.inserting_before(node):
                literal = graph.graph.get_attr(node.name)
            literal.meta = dict(node.meta)
            node.replace_all_uses_with(literal)
            graph.graph.erase_node(node)
    graph.recompile()
    kept = [(spec, value) for spec, value in zip(specs, values, strict=True) if spec.kind != InputKind.CONSTANT_TENSOR]
    static = [position for position, (spec, _) in enumerate(kept) if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
    return graph, [value for _, value in kept], static


class _Asked(BaseException):
    """Ends Inductor's lowering after the scheduler was called."""


def _lowered(graph: torch.fx.GraphModule, inputs: list[Any], static: Sequence[int]) -> tuple[list[Flag], Any]:
    """Returns the flags of Scheduler.should_partition, and the GraphLowering."""
    flags: list[Flag] = []
    seen: list[Any] = []

    def ask(operations: Sequence[Any]) -> None:
        seen.append(V.graph)
        for operation in operations:
            if reason := operation.scheduler.should_partition(operation):
                origins = operation.node.get_origins()
                lines = frozenset([line for origin in origins if (line := _line(origin))])
                flags.append(Flag(by="Scheduler.should_partition", reason=reason, lines=lines))
        raise _Asked

    known = torch._inductor.config.get_config_copy()
    options = {name: value for name, value in OPTIONS.items() if name in known}
    with torch._inductor.config.patch({**options, "_pre_fusion_custom_pass": ask}):
        try:
            compile_fx_inner(graph, inputs, static_input_idxs=static, is_inference=True)
        except _Asked:
            (lowering,) = seen
            return flags, lowering
    raise AssertionError("Inductor did not ask its scheduler")


# --- verdicts on the graph ------------------------------------------------------------------------------------


def _incompatible(graph: torch.fx.GraphModule) -> Iterator[Flag]:
    remaining = list(graph.graph.nodes)
    while (node := get_first_incompatible_cudagraph_node(SimpleNamespace(graph=SimpleNamespace(nodes=remaining)))) is not None:
        line = _line(node)
        yield Flag(by="get_first_incompatible_cudagraph_node", reason=str(node.target), lines=frozenset([line] if line else []))
        remaining = remaining[remaining.index(node) + 1 :]


def _whole(
    lowering: Any, graph: torch.fx.GraphModule, inputs: list[Any], static: Sequence[int], skipped: str | None
) -> Iterator[Flag]:
    """Yields the flags for the whole graph."""
    mutated = lowering.mutated_input_idxs
    placeholders = cudagraph_utils.get_placeholder_info(graph.graph)
    recorded = SimpleNamespace(static_input_idxs=static, mutated_input_idxs=mutated, placeholders=placeholders)
    with torch._inductor.config.patch({"graph_partition": False}):
        said = {
            "GraphLowering.disable_cudagraphs_reason": lowering.disable_cudagraphs_reason,
            "check_for_mutation": cudagraph_utils.check_for_mutation(recorded, inputs, lambda tensor: False),
            "check_for_mutation_ignore_cuda_graph_managed_tensor": (
                cudagraph_utils.check_for_mutation_ignore_cuda_graph_managed_tensor(
                    graph, OrderedSet(lowering.mutated_inputs), OrderedSet(mutated), static
                )
            ),
            "check_multiple_devices_or_any_cpu_nodes": cudagraph_utils.check_multiple_devices_or_any_cpu_nodes(
                dict(lowering.device_node_mapping)
            ),
            "cudagraphs.check_for_skip": skipped,
        }
    if hasattr(cudagraph_utils, "get_input_storage_mutation_info"):
        info = cudagraph_utils.get_input_storage_mutation_info(graph)
        said["get_input_storage_mutation_reason"] = cudagraph_utils.get_input_storage_mutation_reason(info)
    for by, reason in said.items():
        if reason:
            yield Flag(by=by, reason=reason.partition(" Found from")[0].strip().rstrip("."), lines=frozenset())


# --- lines of the user's code ---------------------------------------------------------------------------------


def _line(node: torch.fx.Node) -> str:
    """The user's line that a node comes from, or "" """
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    mine = [short(f"{file}:{line}") for file, line in places if is_user_file(file)]
    return mine[-1] if mine else ""


def _raised_in(error: BaseException) -> Iterator[str]:
    """Yields the innermost of the user's lines in a traceback."""
    mine = []
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_user_file(file):
            mine.append(short(f"{file}:{trace.tb_lineno}"))
        trace = trace.tb_next
    yield from mine[-1:]
