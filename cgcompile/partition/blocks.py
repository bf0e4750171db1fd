"""Splits a program into blocks.  A block consists of straight parts, which have no control flow, and between them `torch.cond` and
`torch.while_loop`, whose bodies are blocks.  Each straight part is lowered as a separate module.  The input graphs are not changed.

Private interfaces (torch 2.11, 2.13): the order of these operators' arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from ..export.higher_order.conditionals import COND, higher_order, is_conditional
from .layers import pieces
from .switches import Case, cases_of, choice_of

Operand = str | int | float | bool | None
"""The name of a value of the block, or a constant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straight:
    """Operations in order, without branches and loops.  `outputs`: the names of the values that later parts of the block need."""

    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """`torch.cond`.  `bodies`: the blocks for true and false; both take `operands`.  `outputs`: the names of the results."""

    name: str
    predicate: str
    bodies: tuple[Block, Block]
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """Nested `torch.cond` operators, each in the false branch of the previous one, that compare one value with constants.  `choice`
    names a uint8 value: the number of the body that runs, from 0.  `operands` has one tuple per body."""

    name: str
    choice: str
    bodies: tuple[Block, ...]
    operands: tuple[tuple[Operand, ...], ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """`torch.while_loop`.  `condition` and `body` take the loop-carried values and then `operands`.  `carried`: the initial
    loop-carried values.  The body returns the new loop-carried values and last the condition for the next iteration."""

    name: str
    condition: Block
    body: Block
    carried: tuple[Operand, ...]
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A graph.  `parts` are in order; the first and the last part are straight.  `inputs` and `outputs` name values.  `source`: the
    original graph.  `module`: a copy in which predicates are bool tensors and choices are uint8 tensors."""

    source: GraphModule
    module: GraphModule
    inputs: tuple[str, ...]
    parts: tuple[Part, ...]
    outputs: tuple[Operand, ...]


Part: TypeAlias = Straight | Branch | Switch | Loop


def has_conditionals(module: GraphModule) -> bool:
    """Whether a program has `torch.cond` or `torch.while_loop`.  Does not look into other higher-order operators."""
    return any(is_conditional(node) for node in module.graph.nodes)


def blocks(module: GraphModule, *, layers: bool = False) -> Block:
    """Builds the block of a graph.  `layers`: also cut the straight parts between equal layers (`layers.pieces`)."""
    return _block(module, _copied(module), layers)


def _block(source: GraphModule, module: GraphModule, layers: bool) -> Block:
    switches = {node: cases for node in module.graph.nodes if (cases := cases_of(source, module, node))}
    for node in [node for node in module.graph.nodes if higher_order(node) == COND]:
        with module.graph.inserting_before(node):
            predicate = node.args[0]
            value = choice_of(module.graph, predicate, switches[node]) if node in switches else _as_byte(module.graph, predicate)
        node.update_arg(0, value)
        if isinstance(predicate, Node) and predicate.op == "call_function" and not predicate.users:
            module.graph.erase_node(predicate)
    names = _names(module.graph)
    straight: list[list[Node]] = [[]]
    conditionals: list[Node] = []
    for node in module.graph.nodes:
        if is_conditional(node):
            conditionals.append(node)
            straight.append([])
        elif node.op == "call_function" and node not in names:
            straight[-1].append(node)
    (output,) = module.graph.find_nodes(op="output")
    groups = [pieces(nodes) if layers else [nodes] for nodes in straight]
    crossing = _crossing_nodes([group for straight_groups in groups for group in straight_groups], conditionals, output)
    parts: list[Part] = []
    for number, straight_groups in enumerate(groups):
        for group in straight_groups:
            outputs = [node for node in group if node in crossing]
            crossing.difference_update(outputs)  # if several parts compute a value, the first one returns it
            parts.append(Straight(nodes=tuple(group), outputs=tuple([node.name for node in outputs])))
        if number < len(conditionals):
            node = conditionals[number]
            node_cases = switches.get(node)
            part = _switch(node, node_cases, names, layers) if node_cases else _conditional(source, module, node, names, layers)
            parts.append(part)
    return Block(
        source=source,
        module=module,
        inputs=tuple([node.name for node in module.graph.find_nodes(op="placeholder")]),
        parts=tuple(parts),
        outputs=tuple([_operand(leaf, names) for leaf in _listed(output.args[0])]),
    )


def straight_module(block: Block, part: Straight, outputs: Sequence[Operand], takes: Sequence[str] = ()) -> GraphModule:
    """Returns a module with the operations of a part, which returns `outputs`.  Its inputs are the values that it needs, and
    `takes`."""
    graph, attributes = Graph(), {}
    new_nodes: dict[str, Any] = {}
    names = _names(block.module.graph)
    nodes_by_name = {node.name: node for node in block.module.graph.nodes}
    part_names = {node.name for node in part.nodes}
    needed = [names.get(source, source.name) for node in part.nodes for source in node.all_input_nodes]
    needed += [operand for operand in (*takes, *outputs) if isinstance(operand, str)]
    for name in dict.fromkeys(needed):
        if name in part_names:
            continue
        if name in nodes_by_name and nodes_by_name[name].op == "get_attr":
            target = str(nodes_by_name[name].target)
            attributes[target] = operator.attrgetter(target)(block.module)
            new_nodes[name] = graph.get_attr(target)
        else:
            new_nodes[name] = graph.placeholder(name.replace(".", "_"))
            new_nodes[name].meta["value"] = name
    for node in part.nodes:
        new_nodes[node.name] = graph.node_copy(node, lambda operand: new_nodes[names.get(operand, operand.name)])
    graph.output(tuple([new_nodes[output] if isinstance(output, str) else output for output in outputs]))
    return GraphModule(attributes, graph)


def taken(module: GraphModule) -> tuple[str, ...]:
    """The names of the input values of a module that `straight_module` returned."""
    return tuple([node.meta["value"] for node in module.graph.find_nodes(op="placeholder")])


def needed_after(block: Block, more: Iterable[Operand] = ()) -> list[set[str]]:
    """Returns, for each part, the names of the values that later parts or the block's outputs need.  `more`: further outputs."""
    names = {operand for operand in (*block.outputs, *more) if isinstance(operand, str)}
    needed: list[set[str]] = []
    for part in reversed(block.parts):
        needed.append(set(names))
        match part:
            case Straight(nodes=nodes):
                names |= set(taken(straight_module(block, part, ()))) if nodes else set()
            case Branch(predicate=predicate, operands=operands):
                names |= {predicate, *[operand for operand in operands if isinstance(operand, str)]}
            case Switch(choice=choice, operands=case_operands):
                names |= {choice, *[operand for operands in case_operands for operand in operands if isinstance(operand, str)]}
            case Loop(carried=carried, operands=operands):
                names |= {operand for operand in (*carried, *operands) if isinstance(operand, str)}
    return needed[::-1]


def _names(graph: Graph) -> dict[Node, str]:
    """The names of the results of branches and loops, by their getitem nodes."""
    return {
        user: f"{node.name}.{user.args[1]}"
        for node in graph.nodes
        if is_conditional(node)
        for user in node.users
        if user.target is operator.getitem
    }


def _crossing_nodes(groups: Sequence[Sequence[Node]], conditionals: Sequence[Node], output: Node) -> set[Node]:
    """The nodes whose values one part computes and another part, a branch, a loop or the output reads."""
    crossing = {source for node in (*conditionals, output) for source in node.all_input_nodes}
    for group in groups:
        inside = set(group)
        crossing |= {source for node in group for source in node.all_input_nodes if source not in inside}
    return crossing


def _switch(node: Node, cases: Sequence[Case], names: dict[Node, str], layers: bool) -> Switch:
    bodies = tuple([_block(case.source, case.module, layers) for case in cases])
    return Switch(
        name=node.name,
        choice=str(_operand(node.args[0], names)),
        bodies=bodies,
        operands=tuple([_operands(case.operands, names) for case in cases]),
        outputs=tuple([f"{node.name}.{number}" for number in range(len(bodies[0].outputs))]),
    )


def _as_byte(graph: Graph, value: Any) -> Node:
    return graph.call_function(torch.ops.aten.ne.Scalar, (value, 0))


def _conditional(source: GraphModule, module: GraphModule, node: Node, names: dict[Node, str], layers: bool) -> Branch | Loop:
    first, second = [(getattr(source, name), getattr(module, name)) for name in _body_names(node)]
    if higher_order(node) == COND:
        predicate, _, _, operands = node.args
        blocks_of = _block(*first, layers), _block(*second, layers)
        return Branch(
            name=node.name,
            predicate=str(_operand(predicate, names)),
            bodies=blocks_of,
            operands=_operands(operands, names),
            outputs=tuple([f"{node.name}.{number}" for number in range(len(blocks_of[0].outputs))]),
        )
    carried, extra_operands = node.args[2:4]
    _as_bool(first[1])
    _append(second[1], first[1], len(carried))
    return Loop(
        name=node.name,
        condition=_block(*first, layers),
        body=_block(*second, layers),
        carried=_operands(carried, names),
        operands=_operands(extra_operands, names),
        outputs=tuple([f"{node.name}.{number}" for number in range(len(carried))]),
    )


def _body_names(node: Node) -> tuple[str, str]:
    """The attribute names of the bodies: (true, false) of a branch, (condition, body) of a loop."""
    first, second = node.args[1:3] if higher_order(node) == COND else node.args[:2]
    assert isinstance(first, Node) and isinstance(second, Node)
    return str(first.target), str(second.target)


def _copied(module: GraphModule) -> GraphModule:
    """Copies the graph and the bodies of its branches and loops.  The copies share the tensors."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    copied = GraphModule(module, graph)
    for node in [node for node in graph.nodes if is_conditional(node)]:
        for name in _body_names(node):
            setattr(copied, name, _copied(getattr(module, name)))
    return copied


def _as_bool(module: GraphModule) -> None:
    """Makes the result of a loop's condition a bool tensor."""
    (output,) = module.graph.find_nodes(op="output")
    (result,) = _listed(output.args[0])
    with module.graph.inserting_before(output):
        output.args = ((_as_byte(module.graph, result),),)


def _append(body: GraphModule, condition: GraphModule, carried: int) -> None:
    """Adds the condition for the next iteration to a loop body's results, so that Inductor can fuse it with the body."""
    (output,) = body.graph.find_nodes(op="output")
    arguments = [*_listed(output.args[0]), *body.graph.find_nodes(op="placeholder")[carried:]]
    copies: dict[Node, Any] = dict(zip(condition.graph.find_nodes(op="placeholder"), arguments, strict=True))
    with body.graph.inserting_before(output):
        for node in condition.graph.nodes:
            if node.op == "output":
                output.args = ((*_listed(output.args[0]), copies[node.args[0][0]]),)
            elif node.op == "get_attr":
                name = f"condition_{str(node.target).replace('.', '_')}"
                setattr(body, name, operator.attrgetter(str(node.target))(condition))
                copies[node] = body.graph.get_attr(name)
            elif node not in copies:
                copies[node] = body.graph.node_copy(node, copies.__getitem__)


def _operands(values: Sequence[Any], names: dict[Node, str]) -> tuple[Operand, ...]:
    return tuple([_operand(value, names) for value in values])


def _operand(value: Any, names: dict[Node, str]) -> Operand:
    return names.get(value, value.name) if isinstance(value, Node) else value


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, Node) else [operand for operand in tree_leaves(value, is_leaf=lambda leaf: leaf is None)]
