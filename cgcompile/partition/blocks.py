"""Programs with branches and loops as blocks: straight parts, and between them `torch.cond` and `torch.while_loop` with blocks of
their own.  Each straight part is a module that is lowered by itself.  Pure FX; the graphs that are given stay as they are.

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
    """Operations in order.  `outputs`: the names of the values that later parts of the block need."""

    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """`torch.cond`: a block for true and one for false take `operands`; `outputs` are the names of what they give."""

    name: str
    predicate: str
    bodies: tuple[Block, Block]
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """`torch.cond` inside of the false side of another, and so on, that all compare one value with constants.  `choice` names a
    byte: the body of that number runs, counted from 0, and takes its own of the `operands`."""

    name: str
    choice: str
    bodies: tuple[Block, ...]
    operands: tuple[tuple[Operand, ...], ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """`torch.while_loop`: `condition` and `body` take what is carried, and behind it `operands`; `carried` are the first values.
    The body gives what is carried on, and last the condition for the next turn."""

    name: str
    condition: Block
    body: Block
    carried: tuple[Operand, ...]
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A graph: its parts in order, the first and the last one straight.  `inputs` and `outputs` name values.  `source` is what it
    was made of, `module` a copy of it whose predicates are tensors of bool."""

    source: GraphModule
    module: GraphModule
    inputs: tuple[str, ...]
    parts: tuple[Part, ...]
    outputs: tuple[Operand, ...]


Part: TypeAlias = Straight | Branch | Switch | Loop


def has_conditionals(module: GraphModule) -> bool:
    """Whether a program has any; not inside of other higher-order operators."""
    return any(is_conditional(node) for node in module.graph.nodes)


def blocks(module: GraphModule, *, layers: bool = False) -> Block:
    """A graph as a block, with those of its branches and loops.  `layers`: of many equal layers each becomes a straight part."""
    return _block(module, _copied(module), layers)


def _block(source: GraphModule, module: GraphModule, layers: bool) -> Block:
    switches = {node: cases for node in module.graph.nodes if (cases := cases_of(source, module, node))}
    for node in [node for node in module.graph.nodes if higher_order(node) == COND]:
        with module.graph.inserting_before(node):
            known = node.args[0]
            value = choice_of(module.graph, known, switches[node]) if node in switches else _as_byte(module.graph, known)
        node.update_arg(0, value)
        if isinstance(known, Node) and known.op == "call_function" and not known.users:
            module.graph.erase_node(known)
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
    wanted = _crossing_nodes([group for cut in groups for group in cut], conditionals, output)
    parts: list[Part] = []
    for number, cut in enumerate(groups):
        for group in cut:
            outputs = [node for node in group if node in wanted]
            wanted.difference_update(outputs)  # what several parts compute the first one gives
            parts.append(Straight(nodes=tuple(group), outputs=tuple([node.name for node in outputs])))
        if number < len(conditionals):
            node = conditionals[number]
            several = switches.get(node)
            part = _switch(node, several, names, layers) if several else _conditional(source, module, node, names, layers)
            parts.append(part)
    return Block(
        source=source,
        module=module,
        inputs=tuple([node.name for node in module.graph.find_nodes(op="placeholder")]),
        parts=tuple(parts),
        outputs=tuple([_operand(leaf, names) for leaf in _listed(output.args[0])]),
    )


def straight_module(block: Block, part: Straight, outputs: Sequence[Operand], takes: Sequence[str] = ()) -> GraphModule:
    """The operations of a part as a module that gives `outputs`; it takes what they need, by name, and `takes` in any case."""
    graph, held = Graph(), {}
    new_nodes: dict[str, Any] = {}
    names = _names(block.module.graph)
    known = {node.name: node for node in block.module.graph.nodes}
    part_names = {node.name for node in part.nodes}
    needed = [names.get(source, source.name) for node in part.nodes for source in node.all_input_nodes]
    needed += [operand for operand in (*takes, *outputs) if isinstance(operand, str)]
    for name in dict.fromkeys(needed):
        if name in part_names:
            continue
        if name in known and known[name].op == "get_attr":
            target = str(known[name].target)
            held[target] = operator.attrgetter(target)(block.module)
            new_nodes[name] = graph.get_attr(target)
        else:
            new_nodes[name] = graph.placeholder(name.replace(".", "_"))
            new_nodes[name].meta["value"] = name
    for node in part.nodes:
        new_nodes[node.name] = graph.node_copy(node, lambda operand: new_nodes[names.get(operand, operand.name)])
    graph.output(tuple([new_nodes[output] if isinstance(output, str) else output for output in outputs]))
    return GraphModule(held, graph)


def taken(module: GraphModule) -> tuple[str, ...]:
    """The names of the values that a module of `straight_module` takes."""
    return tuple([node.meta["value"] for node in module.graph.find_nodes(op="placeholder")])


def needed_after(block: Block, more: Iterable[Operand] = ()) -> list[set[str]]:
    """After each part the names that the rest of the block needs, its outputs and `more` among them."""
    rest = {operand for operand in (*block.outputs, *more) if isinstance(operand, str)}
    needed: list[set[str]] = []
    for part in reversed(block.parts):
        needed.append(set(rest))
        match part:
            case Straight(nodes=nodes):
                rest |= set(taken(straight_module(block, part, ()))) if nodes else set()
            case Branch(predicate=predicate, operands=operands):
                rest |= {predicate, *[operand for operand in operands if isinstance(operand, str)]}
            case Switch(choice=choice, operands=several):
                rest |= {choice, *[operand for operands in several for operand in operands if isinstance(operand, str)]}
            case Loop(carried=carried, operands=operands):
                rest |= {operand for operand in (*carried, *operands) if isinstance(operand, str)}
    return needed[::-1]


def _names(graph: Graph) -> dict[Node, str]:
    """Names of the results of branches and loops."""
    return {
        user: f"{node.name}.{user.args[1]}"
        for node in graph.nodes
        if is_conditional(node)
        for user in node.users
        if user.target is operator.getitem
    }


def _crossing_nodes(groups: Sequence[Sequence[Node]], conditionals: Sequence[Node], output: Node) -> set[Node]:
    """The nodes whose values cross from one part to another."""
    wanted = {source for node in (*conditionals, output) for source in node.all_input_nodes}
    for group in groups:
        inside = set(group)
        wanted |= {source for node in group for source in node.all_input_nodes if source not in inside}
    return wanted


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
    carried, more = node.args[2:4]
    _as_bool(first[1])
    _append(second[1], first[1], len(carried))
    return Loop(
        name=node.name,
        condition=_block(*first, layers),
        body=_block(*second, layers),
        carried=_operands(carried, names),
        operands=_operands(more, names),
        outputs=tuple([f"{node.name}.{number}" for number in range(len(carried))]),
    )


def _body_names(node: Node) -> tuple[str, str]:
    """Where the modules of a branch or a loop are: of true and false, or of the condition and a turn."""
    one, two = node.args[1:3] if higher_order(node) == COND else node.args[:2]
    assert isinstance(one, Node) and isinstance(two, Node)
    return str(one.target), str(two.target)


def _copied(module: GraphModule) -> GraphModule:
    """A copy of the graph, and of those of its branches and loops; the tensors are the same."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    copied = GraphModule(module, graph)
    for node in [node for node in graph.nodes if is_conditional(node)]:
        for name in _body_names(node):
            setattr(copied, name, _copied(getattr(module, name)))
    return copied


def _as_bool(module: GraphModule) -> None:
    """Makes the result of a loop's condition a tensor of bool."""
    (output,) = module.graph.find_nodes(op="output")
    (result,) = _listed(output.args[0])
    with module.graph.inserting_before(output):
        output.args = ((_as_byte(module.graph, result),),)


def _append(body: GraphModule, condition: GraphModule, carried: int) -> None:
    """Makes the condition for the next turn the last result of a loop's body: what compares is fused with what computes."""
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
