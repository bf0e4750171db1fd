"""Rules about mutated buffers, attributes and inputs, and about tensors that share memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node

from cgbundle.call.aliasing import folds, reach, shared
from cgbundle.format.schema import Finding

from ..export.functionalization import state_buffers
from ..export.weights import weight_placeholders
from ..model.flat_module import PREFIX
from ..model.tracing.attributes import ATTRIBUTE_FIX
from ..model.user_code import place
from .context import NOTE, REFUSE, RuleContext, finding
from .shapes import outputs

CLONE = "clone the input before writing, and return the result"
LISTED = 3
"""The number of buffers that a finding names."""

RETURN = "return the new value as an output, and pass it in as an input"


def mutated_buffer(context: RuleContext) -> Iterable[Finding]:
    """A buffer that forward() writes to: a cache, running statistics, a counter.

    What it looks for: buffers that get new values in the functional form of the program.
    Why CUDA cares: a replay writes to the same address each time.  Such a buffer is state of a session, in memory that all int_keys
    share.  It starts with the value of the model's buffer; `program.state` reads and writes it, and `program.reset()` resets it.
    Effect: calls are neither padded nor chunked, because padding would be written too.
    Fix: none needed; or return the new value as an output, and pass it in as an input.
    Source: check_for_mutation in torch/_inductor/cudagraph_utils.py excepts static inputs (buffers).
    """
    placeholders = {target: name for name, target in context.program.graph_signature.inputs_to_buffers.items()}
    lines: dict[tuple[str, str], list[tuple[str, Node | None]]] = {}
    for target in state_buffers(context.functionalized):
        writer = _writer(context, placeholders.get(target, ""))
        lines.setdefault(place(writer), []).append((f"{target.removeprefix(PREFIX)!r}", writer))
    for name, writer in [pair for writes in lines.values() for pair in _grouped(writes)]:
        yield finding(
            "mutated-buffer", NOTE, f"{context.exported.source.entry}() writes to {name}", writer,
            "it is state of a session; no call is padded or chunked", f"none needed; or {RETURN}",
        )  # fmt: skip


def _grouped(writes: list[tuple[str, Node | None]]) -> list[tuple[str, Node | None]]:
    """Returns (text, writing node) for the buffers that one source line writes to.  Many buffers, as in an optimizer, share one."""
    names = [name for name, _ in writes]
    if len(names) <= LISTED + 1:
        return [(f"the buffer {name}", writer) for name, writer in writes]
    return [(f"{len(names)} buffers: {', '.join(names[:LISTED])} and {len(names) - LISTED} more", writes[0][1])]


def mutated_attribute(context: RuleContext) -> Iterable[Finding]:
    """An attribute that forward() changes at every call and that is not a buffer: a list that grows, an object kept for the next
    call, a parameter.

    What it looks for: attributes of modules that also change in a second call with the same inputs (model/tracing/attributes.py).
    Also parameters that get new values in the functional form of the program.
    Why CUDA cares: a replay runs kernels and no Python, so the attribute would keep its value from the export.
    Effect: no bundle can be built, because all its results would be those of the first call.  It is only a note if every call
    assigns the attribute before it reads it.  It is also only a note if no result depends on the attribute.  This holds for
    numbers, tensors in a list or a dict, and buffers that calls create again at every size.  The build turns a number, or a tensor
    that keeps its shape and dtype, into a buffer.
    Fix: use a buffer, `self.register_buffer(name, torch.zeros(()))`, and write to it: it becomes state, which lasts from call to
    call.
    Source: torch.export traces Python once ("attributes assigned during export").
    """
    placeholders = {target: name for name, target in context.program.graph_signature.inputs_to_parameters.items()}
    for target in sorted(set(context.functionalized.parameters_to_mutate.values())):
        name = target.removeprefix(PREFIX)
        yield finding(
            "mutated-attribute", REFUSE, f"{context.exported.source.entry}() writes to the parameter {name!r}",
            _writer(context, placeholders.get(target, "")), "no call changes the weights of a bundle, only buffers", ATTRIBUTE_FIX,
        )  # fmt: skip
    for obstacle in context.obstacles("mutated-attribute"):
        yield finding(
            "mutated-attribute", REFUSE, obstacle.message, obstacle,
            "a replay runs no Python, so it would keep its value from the build", ATTRIBUTE_FIX,
        )  # fmt: skip
    for obstacle in context.obstacles("assigned-attribute"):
        yield finding(
            "mutated-attribute", NOTE, f"{obstacle.message}, and reads it only afterwards", obstacle,
            "none on results: every call assigns it first; a bundle has no attributes", "return it, if you need its value",
        )  # fmt: skip
    for obstacle in context.obstacles("unread-attribute"):
        yield finding(
            "mutated-attribute", NOTE, f"{obstacle.message}, and no result depends on it", obstacle,
            "a bundle does not keep it", "none needed; to keep it, return it, or register a buffer",
        )  # fmt: skip


def mutated_input(context: RuleContext) -> Iterable[Finding]:
    """An input that forward() writes to.

    What it looks for: inputs that get new values in the functional form of the program.
    Why CUDA cares: a graph writes to a static buffer with a copy of the input.
    Effect: the runtime copies the buffer back to the caller's tensor.  Calls are neither padded nor chunked.  An input whose
    elements share memory with each other or with another input is refused, because a write would change other elements too.
    Fix: none needed; or clone the input before writing, and return the result.
    Source: check_for_mutation and get_input_storage_mutation_reason in torch/_inductor/cudagraph_utils.py.
    """
    for target in sorted(set(context.functionalized.user_inputs_to_mutate.values())):
        name, shared_with = _input_name(context, target), _shared(context, target)
        severity, effect, fix = (
            (REFUSE, f"it shares memory with {shared_with}, where the write would show in eager PyTorch and not in a bundle", CLONE)
            if shared_with
            else (NOTE, "the caller's tensor is updated after the call; no call is padded or chunked", f"none needed; or {CLONE}")
        )
        yield finding(
            "mutated-input",
            severity,
            f"{context.exported.source.entry}() writes to its input {name!r}",
            _writer(context, target),
            effect,
            fix,
        )


def overlapping_input(context: RuleContext) -> Iterable[Finding]:
    """Inputs whose elements share memory: an expanded tensor, or two inputs that are views of one tensor.

    What it looks for: example inputs with stride 0 along an axis longer than 1, and two inputs in one storage.
    Why CUDA cares: a graph reads every input from its own dense static buffer, where the elements do not share memory.
    Effect: none on results, as long as no operation writes to them (mutated-input refuses that).  An expanded input is copied to
    its full size.
    Fix: pass the small tensor, and expand it inside forward().
    Source: get_expanded_dims in torch/_inductor/compile_fx.py, and check_memory_overlap in PyTorch.
    """
    owners: dict[int, str] = {}
    for name, tensor in context.exported.flat.like.leaves:
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            yield finding(
                "overlapping-input", NOTE, f"the input {name!r} is expanded: its elements share memory", None,
                "every call copies it at its full size", "pass the small tensor, and expand it inside forward()",
            )  # fmt: skip
        storage = tensor.untyped_storage().data_ptr()
        if storage and storage in owners:
            yield finding(
                "overlapping-input", NOTE, f"the inputs {owners[storage]!r} and {name!r} share memory", None,
                "every call copies both", "pass the tensor once, and take its parts inside forward()",
            )  # fmt: skip
        owners.setdefault(storage, name)


def aliased_output(context: RuleContext) -> Iterable[Finding]:
    """An output that is an input or a weight, or a view of one.

    What it looks for: outputs of the exported program that share memory with one of its inputs or weights.
    Why CUDA cares: the inputs of a graph are in static buffers, which the next call overwrites.
    Effect: the output shares memory with the caller's tensor, the weight or the state.  A write to either also changes the other.
    Fix: none needed; clone it in forward() if you need a separate tensor.
    Source: OutputAliasInfo in torch/_inductor/cudagraph_trees.py.
    """
    weights = weight_placeholders(context.program)
    owners = {storage: node for node in context.program.graph.nodes if node.op == "placeholder" for storage in _storages(node)}
    for node, name in outputs(context):
        for storage in _storages(node):
            if storage in owners:
                owner = _owner_text(context, owners[storage].name, owners[storage].name in weights)
                yield finding(
                    "aliased-output", NOTE, f"the output {name!r} shares memory with {owner}", node,
                    "a call returns a view of it, as in eager PyTorch, not a copy",
                    "none needed; or clone it in forward() for a tensor that nothing else changes",
                )  # fmt: skip


def _storages(node: Node) -> Iterator[int]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        yield value.untyped_storage()._cdata


def _owner_text(context: RuleContext, placeholder: str, weight: bool) -> str:
    """Names the input, weight or buffer that an output shares memory with."""
    if not weight:
        return f"the input {_input_name(context, placeholder)!r}"
    target = weight_placeholders(context.program)[placeholder]
    label = "buffer" if target in context.functionalized.buffers_to_mutate.values() else "weight"
    return f"the {label} {target.removeprefix(PREFIX)!r}"


def _input_name(context: RuleContext, placeholder: str) -> str:
    user = [name for name in context.program.graph_signature.user_inputs if isinstance(name, str)]
    leaves = context.exported.flat.like.leaves
    return leaves[user.index(placeholder)][0] if placeholder in user and len(user) == len(leaves) else placeholder


def _shared(context: RuleContext, placeholder: str) -> str:
    """Returns a text that names the example input that shares memory with an input, or "".  It can be the input itself."""
    user = list(context.functionalized.user_inputs)
    leaves = context.exported.flat.like.leaves
    reaches = [
        reach(t.data_ptr(), t.shape, [stride * t.element_size() for stride in t.stride()], t.element_size()) for _, t in leaves
    ]
    position = user.index(placeholder)
    if folds(reaches[position]):
        return "itself (it is expanded)"
    return next((f"the input {leaves[other][0]!r}" for _, other in shared(reaches, [position])), "")


def _writer(context: RuleContext, placeholder: str) -> Node | None:
    """Returns the first operation that writes to an input of the program or to a view of it."""
    nodes = list(context.program.graph.nodes)
    owners = {storage for node in nodes if node.name == placeholder for storage in _storages(node)}
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            schema = node.target._schema.arguments
            for argument, value in zip(schema, node.args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(value, Node) and owners & set(_storages(value)):
                    return node
    return None
