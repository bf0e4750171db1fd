"""Assigns each operation of a model that is split by layers to a device.

A *layer* is an element of a list of modules (nn.ModuleList, nn.Sequential).  Layers go to the devices in order, and each device
gets about the same bytes of weights.  Other operations go to the last device that computes one of their arguments.

An operation is *free* if every device that uses its result computes it.  These operations depend only on inputs, or only on
weights, or are outside the layers and depend on at most `SMALL` bytes of weights.

Every assignment gives the same results (`share.py`).  The assignments of this module send data once from each device to the next.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ...errors import BuildError
from ...export.weights import weight_placeholders, weight_tensors

SMALL = 1 << 20
"""The maximum bytes of weights of a free operation that also depends on inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """`ranks`: the device of each operation and of each buffer that calls change, by the names of the nodes.  All other nodes are
    free."""

    ranks: Mapping[str, int]


def assign_devices(
    programs: Sequence[ExportedProgram], state: Sequence[str], world: int
) -> tuple[dict[str, int], list[Assignment]]:
    """Returns the device of every buffer of `state`, and the assignment of each program.  The programs are functional, and belong
    to one model.  Raises split-refused."""
    layers = _layer_ranks(programs, world)
    owners = _owners(programs, layers, state)
    assignments = [_Assigner(program, layers, state, owners).assignment() for program in programs]
    return {name: owners.get(name, 0) for name in state}, assignments


def layer_of(node: Node) -> str:
    """The module path of the layer that an operation belongs to, or "".  If layers are nested, returns the outermost one."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        if path.rpartition(".")[2].isdecimal():
            return str(path)
    return ""


def _owners(programs: Sequence[ExportedProgram], layers: Mapping[str, int], state: Sequence[str]) -> dict[str, int]:
    """Maps every buffer that a layer reads to the device of the first layer that reads it.  Ignores operations outside the layers,
    such as those of an entry that resets caches."""
    owners: dict[str, int] = {}
    for program in programs:
        names = weight_placeholders(program)
        for node in program.graph.nodes:
            if (layer := layer_of(node)) in layers:
                for name in [names[operand.name] for operand in node.all_input_nodes if operand.name in names]:
                    if name in state:
                        owners.setdefault(name, layers[layer])
    return owners


def _layer_ranks(programs: Sequence[ExportedProgram], world: int) -> dict[str, int]:
    """The device of every layer, for the list of layers that has the most weights."""
    used: list[tuple[str, dict[str, int]]] = []  # for each operation: its layer, and the bytes of its weights
    for program in programs:
        names, tensors = weight_placeholders(program), weight_tensors(program)
        for node in program.graph.nodes:
            if node.op == "call_function":
                weights = [names[operand.name] for operand in node.all_input_nodes if operand.name in names]
                used.append((layer_of(node), {name: tensors[name].nbytes for name in weights}))
    lists: dict[str, dict[str, int]] = {}  # path of the list -> the bytes of its layers, in the order of their calls
    counted: set[str] = set()
    for path, read in used:
        if path:
            layers = lists.setdefault(path.rpartition(".")[0], {})
            layers[path] = layers.get(path, 0) + sum(size for name, size in read.items() if name not in counted)
            counted |= read.keys()
    before, after, inside = 0, 0, False
    for path, read in used:
        inside = inside or bool(path)
        size = sum(size for name, size in read.items() if name not in counted)
        before, after = (before, after + size) if inside else (before + size, after)
        counted |= read.keys()
    long_lists = [layer_sizes for layer_sizes in lists.values() if len(layer_sizes) >= world]
    if not long_lists:
        text = f"no list of layers (nn.ModuleList, nn.Sequential) with {world} elements or more is called"
        raise BuildError("split-refused", f"model: {text}")
    layers = max(long_lists, key=lambda layer_sizes: sum(layer_sizes.values()))
    outside = sum(sum(layer_sizes.values()) for layer_sizes in lists.values()) - sum(layers.values())
    ranks: dict[str, int] = {}
    total, offset = before + outside + sum(layers.values()) + after, before + outside
    for index, (path, size) in enumerate(layers.items()):
        middle = min(int((offset + size / 2) * world / max(1, total)), world - 1)
        lowest = world - (len(layers) - index)  # a lower rank would leave fewer layers than devices
        previous = ranks[next(reversed(ranks))] if ranks else 0
        ranks[path] = min(max(middle, lowest, previous), previous + 1 if ranks else 0)
        offset += size
    return ranks


class _Assigner:
    def __init__(self, program: ExportedProgram, layers: Mapping[str, int], state: Sequence[str], owners: dict[str, int]) -> None:
        self._program, self._layers, self._owners = program, layers, owners
        names = weight_placeholders(program)
        self._tensors = weight_tensors(program)
        self._state = {placeholder: name for placeholder, name in names.items() if name in state}
        self._weights = {
            node: frozenset([names[node.name]])
            for node in program.graph.nodes
            if node.name in names and node.name not in self._state
        }
        self._reads = {node: False for node in program.graph.nodes}
        """Whether a free operation reads an input of the call."""
        self._ranks: dict[Node, int] = {}

    def assignment(self) -> Assignment:
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                self._reads[node] = node not in self._weights
            elif node.op == "call_function":
                self._assign(node)
        mutated = self._program.graph_signature.buffers_to_mutate
        for node in self._program.graph.nodes:
            if node.name in mutated and mutated[node.name] not in self._owners:
                self._owners[mutated[node.name]] = self._ranks.get(node, 0)
        ranks = {node.name: rank for node, rank in self._ranks.items()}
        places = {placeholder: self._owners[name] for placeholder, name in self._state.items() if name in self._owners}
        return Assignment(ranks=ranks | places)

    def _assign(self, node: Node) -> None:
        operands = node.all_input_nodes
        state = [self._state[operand.name] for operand in operands if operand.name in self._state]
        pinned = [self._ranks[operand] for operand in operands if operand in self._ranks]
        if not _has_tensors(node):
            self._reads[node] = True  # it returns a size, which depends on the inputs' sizes
            return
        if node.target is operator.getitem and operands[0] in self._ranks:
            self._ranks[node] = self._ranks[operands[0]]
            return
        if not state and not pinned:
            weights = frozenset().union(*[self._weights.get(operand, frozenset()) for operand in operands])
            reads = any(self._reads[operand] for operand in operands)
            small = layer_of(node) not in self._layers and sum(self._tensors[name].nbytes for name in weights) <= SMALL
            if small or not (weights and reads):
                self._weights[node], self._reads[node] = weights, reads
                return
        owned = [self._owners[name] for name in state if name in self._owners]
        rank = self._layers.get(layer_of(node), max([*pinned, *owned], default=0))
        self._ranks[node] = rank
        for name in state:
            self._owners.setdefault(name, rank)


def _has_tensors(node: Node) -> bool:
    """Whether an operation returns tensors or nothing.  Other operations return sizes."""
    leaves = [leaf for leaf in tree_leaves(node.meta.get("val")) if leaf is not None]
    return not leaves or any(isinstance(leaf, torch.Tensor) for leaf in leaves)
