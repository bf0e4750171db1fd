"""Outputs that share memory with an input, a weight, state or another output, as in eager PyTorch.

The sharing is observed in eager PyTorch, not derived: a `reshape` may copy, and `contiguous` and `to` may return the tensor itself.
In a bundle the Value of such an output lies in the shared memory, even if the compiled code returns a copy.  An output of
`torch.cond` gets separate memory, because another branch may return a tensor that shares no memory.

Private interface (torch 2.11, 2.13): `_cdata` of a storage, which is equal for fake tensors that share memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule, Node

from cgbundle.format.schema import DTYPES, HOST, Alias, IntKey, Program, TensorSpec, Value, Weight

from ..errors import ModelError
from ..export.exported import Exported
from ..export.higher_order.conditionals import bodies, is_conditional
from ..model.flat_module import PREFIX, FlatModule


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A tensor as a view of a base tensor.  `offset`: bytes from the base's first element.  `strides` and `base_strides`: strides
    of the view and of the base, in elements."""

    offset: int
    strides: tuple[int, ...]
    base_strides: tuple[int, ...]


SharedMemory = Literal["inputs", "outputs", "weights", "state"]
"""Kinds of memory that an output can share, as in `Alias.memory`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputAlias:
    """Output number `output` shares memory with a base tensor: input or output number `index`, or the weight `name`.

    `memory`: the kind of base.  It is "weights" for a weight, or "state" if calls change that weight.  `views`: the output as a
    view of the base, at every int_key.
    """

    output: int
    memory: SharedMemory
    index: int
    name: str
    views: Mapping[IntKey, View]


_AliasKey = tuple[int, SharedMemory, int, str]
"""`output`, `memory`, `index` and `name` of an OutputAlias."""


def find_aliases(exported: Exported, outputs: Sequence[TensorSpec], state: Sequence[str]) -> tuple[OutputAlias, ...]:
    """Returns the outputs that share memory, with their views at every int_key.  Runs the model at every int_key, but only once if
    no output shares memory.

    `state`: the buffers that the program writes to.  Raises outputs-shared if the sharing differs between sizes, or if two outputs
    overlap and neither contains the other.
    """
    keys = exported.keys
    changed = frozenset(name.removeprefix(PREFIX) for name in state)

    def at(key: IntKey) -> dict[_AliasKey, View]:
        tensors = exported.inputs_at(key)
        shared_views = _observe(exported.flat, tensors, changed, [spec.name for spec in outputs])
        return _keep_on_all_branches(exported.programs.at(key), shared_views) if shared_views else shared_views

    first = at(keys[0])
    if not first:
        return ()
    by_key = {key: first if key == keys[0] else at(key) for key in keys}
    for key, views_at_key in by_key.items():
        if views_at_key.keys() != first.keys():
            raise ModelError(
                "outputs-shared",
                f"{exported.source.label}: different outputs share memory at different sizes ({keys[0]} and {key}): "
                f"a reshape or contiguous() copies at some of them",
            )
    views = {alias: {key: views_at_key[alias] for key, views_at_key in by_key.items()} for alias in first}
    return tuple(
        [OutputAlias(output=alias[0], memory=alias[1], index=alias[2], name=alias[3], views=views[alias]) for alias in first]
    )  # fmt: skip


def manifest_aliases(aliases: Sequence[OutputAlias], weights: Sequence[Weight]) -> tuple[Alias, ...]:
    """Returns the aliases as rows of the manifest."""
    return tuple([Alias(output=alias.output, memory=alias.memory, index=_index(alias, weights)) for alias in aliases])


def with_aliases(
    programs: tuple[Program, ...], aliases: Sequence[OutputAlias], outputs: Sequence[TensorSpec], weights: Sequence[Weight]
) -> tuple[Program, ...]:
    """Returns the programs with changed Values: an output that shares memory lies in the memory of its base tensor.

    On the cpu target, offsets count bytes from the first element of the base.  In a bundle for a GPU, they count from the start of
    the base's memory.
    Raises outputs-shared if the compiled code lays out the base differently from eager PyTorch.
    """
    return tuple([_with_aliases(program, aliases, outputs, weights) for program in programs])


def _with_aliases(
    program: Program, aliases: Sequence[OutputAlias], specs: Sequence[TensorSpec], weights: Sequence[Weight]
) -> Program:
    values, outputs = list(program.values), list(program.outputs)
    for alias in aliases:
        view, value = alias.views[program.key], values[program.outputs[alias.output]]
        base = _weight(alias, weights) if alias.name else _value(alias, program)
        strides = zip(base.strides, view.base_strides, base.shape, strict=True)
        if not all(compiled == eager or size < 2 for compiled, eager, size in strides):
            raise ModelError(
                "outputs-shared",
                f"output {specs[alias.output].name!r}, int_key {program.key}: in eager PyTorch it shares memory with a tensor to "
                f"which the compiled code gives other strides",
            )
        if value.memory == "host":
            values[program.outputs[alias.output]] = replace(value, offset=view.offset, strides=view.strides)
            continue
        values.append(replace(value, memory=base.memory, offset=base.offset + view.offset, strides=view.strides))
        outputs[alias.output] = len(values) - 1
    return replace(program, values=tuple(values), outputs=tuple(outputs))


def _index(alias: OutputAlias, weights: Sequence[Weight]) -> int:
    return next(i for i, row in enumerate(weights) if row.name == alias.name) if alias.name else alias.index


def _weight(alias: OutputAlias, weights: Sequence[Weight]) -> Weight:
    """Returns the row of the weight.  Raises outputs-shared for a weight that is only on the host."""
    row = weights[_index(alias, weights)]
    if row.memory == HOST:
        raise ModelError("outputs-shared", f"an output shares memory with the weight {row.name!r}, which is only in host memory")
    return row


def _value(alias: OutputAlias, program: Program) -> Value:
    return program.values[(program.inputs if alias.memory == "inputs" else program.outputs)[alias.index]]


def _observe(
    flat: FlatModule, tensors: Sequence[torch.Tensor], state: frozenset[str], names: Sequence[str]
) -> dict[_AliasKey, View]:
    """Runs a call, and returns the outputs that share memory as views, in the order of the outputs."""
    inputs = tuple([tensor.clone() for tensor in tensors])
    owners: dict[_StorageKey, tuple[SharedMemory, int, str, torch.Tensor]] = {}
    for name, weight in (*flat.model.named_parameters(), *flat.model.named_buffers()):
        owners.setdefault(_storage(weight), ("state" if name in state else "weights", 0, name, weight))
    for index, tensor in enumerate(inputs):
        owners[_storage(tensor)] = ("inputs", index, "", tensor)
    try:
        with torch.no_grad():
            outputs: tuple[torch.Tensor, ...] = flat(*inputs)
        views: dict[_AliasKey, View] = {}
        for index, output in enumerate(outputs):
            if output.numel() and (owner := owners.get(_storage(output))):
                memory, number, name, base = owner
                _check_dtype(names[index], output, base)
                views[index, memory, number, name] = _view(output, base)
        owned = {alias_key[0] for alias_key in views}
        views |= _views_of_outputs(outputs, [index for index in range(len(outputs)) if index not in owned], names)
    finally:
        flat.snapshot.restore()
    return dict(sorted(views.items()))


def _keep_on_all_branches(program: ExportedProgram, views: Mapping[_AliasKey, View]) -> dict[_AliasKey, View]:
    """Returns only the views that exist on all branches.  An output that depends on a branch is kept only if it shares memory in
    the exported program too.  In that program, the result of a branch is a new tensor."""
    graph, specs = program.graph, program.graph_signature.output_specs
    dependent: set[Node] = set()
    for node in graph.nodes:
        if _has_branches(node, program.graph_module) or not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    node_specs = zip(graph.output_node().args[0], specs, strict=True)
    outputs = [node for node, spec in node_specs if spec.kind is OutputKind.USER_OUTPUT]
    input_storages = {_storage_id(node) for node in graph.find_nodes(op="placeholder")} - {None}

    def is_kept(alias_key: _AliasKey) -> bool:
        output, memory, base, _ = alias_key
        if memory != "outputs":
            return outputs[output] not in dependent or _storage_id(outputs[output]) in input_storages
        same_storage = _storage_id(outputs[output]) == _storage_id(outputs[base])
        return dependent.isdisjoint({outputs[output], outputs[base]}) or same_storage

    return {alias_key: view for alias_key, view in views.items() if is_kept(alias_key)}


def _has_branches(node: Node, module: GraphModule) -> bool:
    """Whether an operator is a branch, or contains one.  Then the memory of its result depends on data."""
    parts = [part for body in bodies(node, module) for part in body.modules() if isinstance(part, GraphModule)]
    return is_conditional(node) or any(is_conditional(inner) for part in parts for inner in part.graph.nodes)


def _storage_id(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _views_of_outputs(outputs: Sequence[torch.Tensor], indices: Iterable[int], names: Sequence[str]) -> dict[_AliasKey, View]:
    """Returns the outputs that share elements with another output, as views of it.  The base is the output that spans the most
    memory."""
    groups: dict[_StorageKey, list[int]] = {}
    for index in indices:
        if outputs[index].numel():
            group = groups.setdefault(_storage(outputs[index]), [])
            if group:
                _check_dtype(names[index], outputs[index], outputs[group[0]])
            group.append(index)
    bases: dict[int, int] = {}
    for group in groups.values():
        ordered = sorted(group, key=lambda index: (-_span(outputs[index]), index))
        for position, index in enumerate(ordered):
            for base in ordered[:position]:
                if base in bases or not _overlap(outputs[base], outputs[index]):
                    continue
                if not _is_inside(outputs[index], outputs[base]):
                    raise ModelError(
                        "outputs-shared", f"outputs {names[base]!r} and {names[index]!r} overlap, and neither contains the other"
                    )
                bases[index] = base
                break
    return {(index, "outputs", base, ""): _view(outputs[index], outputs[base]) for index, base in bases.items()}


def _check_dtype(name: str, output: torch.Tensor, other: torch.Tensor) -> None:
    """Raises outputs-shared if the same memory is viewed as another dtype (`view(dtype)`, `view_as_real`)."""
    if output.dtype != other.dtype:
        raise ModelError("outputs-shared", f"output {name!r} views memory of a tensor of {other.dtype} as {output.dtype}")


_StorageKey = tuple[int, bool, bool]
"""The address of a storage, and torch's conjugate and negative bits.  `x.conj()` is a view of x with the conjugate bit set.  A
bundle has no such bits.  So an output whose bits differ from those of x gets separate memory."""


def _storage(tensor: torch.Tensor) -> _StorageKey:
    return tensor.untyped_storage().data_ptr(), tensor.is_conj(), tensor.is_neg()


def _view(tensor: torch.Tensor, base: torch.Tensor) -> View:
    size = DTYPES[str(base.dtype).removeprefix("torch.")]
    offset = (tensor.storage_offset() - base.storage_offset()) * size
    return View(offset=offset, strides=tensor.stride(), base_strides=base.stride())


def _span(tensor: torch.Tensor) -> int:
    """Returns the number of elements in memory from the first to the last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_inside(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    begin = tensor.storage_offset() - base.storage_offset()
    return begin >= 0 and begin + _span(tensor) <= _span(base)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have a common element.  Compares elements, not ranges: the chunks of a tensor interleave
    in memory, but have no common element."""
    begin = min(one.storage_offset(), other.storage_offset())
    end = max(tensor.storage_offset() + _span(tensor) for tensor in (one, other))
    marks = torch.zeros(end - begin, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - begin).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - begin).any())
