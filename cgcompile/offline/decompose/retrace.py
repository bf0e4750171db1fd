"""Retraces a program at one int_key to a graph of small operations on fake cuda tensors with constant sizes.  Private interfaces
(torch 2.11, 2.13): `FakeTensorMode`, `make_fx`, `torch.fx.traceback.preserve_node_meta` and the `from_node` that it adds to the
metadata, `torch.func.functionalize`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.proxy_tensor import make_fx

from ...errors import BuildError, ModelError
from ...targets.memory_layout import dense_strides
from ...transforms.inductor_passes import unchecked_puts
from .arguments import argument_rows, changed_outputs, check_apart, fake_tensor
from .decompositions import decompositions
from .device_program import Replacing, named_node, on_device
from .outputs import COPY, copy_back, with_strides


@dataclass(frozen=True, kw_only=True, slots=True)
class Retraced:
    """`graph` takes `tensors` (fake, on cuda, created by `mode`), whose kinds and names are `names`, and returns the outputs.  It
    is functional, except that it copies new values at its end to the tensors at the positions `written`.  `program`: the graph that
    was traced."""

    graph: torch.fx.GraphModule
    tensors: tuple[torch.Tensor, ...]
    names: tuple[tuple[str, str], ...]
    written: tuple[int, ...]
    mode: FakeTensorMode
    program: torch.fx.GraphModule


def retrace(
    program: ExportedProgram,
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[tuple[int, ...] | None] = (),
    *,
    writes: bool = False,
) -> Retraced:
    """Retraces the program at the sizes of `tensors`, inside `fake_device`.  `layouts`: the strides that each output must have, or
    None; () if none is fixed.  `writes`: the program writes to buffers or inputs.  Raises inputs-unlike, state-shared,
    constant-unknown, random-operation, operator-without-kernel."""
    source = program.graph_module
    if writes or any(getattr(node.target, "__module__", "").startswith("torch._functorch") for node in program.graph.nodes):
        # turns new values of mutated tensors into outputs, and removes vmap's batch axes; most other operations stay
        program = program.run_decompositions({})
    rows = argument_rows(program, tensors)
    changed = changed_outputs(program)
    module = on_device(program.graph_module)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = tuple([fake_tensor(tensor) for _, _, tensor in rows if tensor is not None])
    is_user_output = [spec.kind == OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs]

    def run(*inputs: torch.Tensor) -> tuple[Any, ...]:
        remaining = iter(inputs)
        arguments = [None if tensor is None else next(remaining) for _, _, tensor in rows]
        results = Replacing(module, source).run(*arguments, enable_io_processing=False)
        values = [result for result, keep in zip(results, is_user_output, strict=True) if keep]
        outputs = [with_strides(result, strides) for result, strides in zip(values, layouts or [None] * len(values), strict=True)]
        return (*outputs, *[results[position] for position, _ in changed])

    with mode, torch.no_grad(), torch.fx.traceback.preserve_node_meta(), unchecked_puts(source):
        traced = make_fx(torch.func.functionalize(run, remove="mutations"), decomposition_table=decompositions())(*fakes)
    _check(traced)
    places = [place for place, (_, _, tensor) in enumerate(rows) if tensor is not None]
    written = tuple([places.index(argument) for _, argument in changed])
    tensor_rows = [rows[place] for place in places]
    check_apart([tensor_rows[index] for index in written], tensor_rows)
    copy_back(traced, written)
    names = tuple([(kind, name) for kind, name, _ in tensor_rows])
    return Retraced(graph=traced, tensors=fakes, names=names, written=written, mode=mode, program=source)


DENSE = "dense"
"""A layout: dense, with the axes in their memory order."""

Layout = tuple[int, ...] | str | None
"""The strides that an output must have, DENSE, or None for any."""


def retrace_straight(
    module: torch.fx.GraphModule,
    source: torch.fx.GraphModule,
    arguments: Sequence[Any],
    names: Sequence[tuple[str, str]],
    mode: FakeTensorMode,
    layouts: Sequence[Layout],
    written: Sequence[int],
) -> tuple[Retraced, dict[int, Any]]:
    """Retraces a straight part of a program (without branches and loops) with fake tensors and numbers.  Returns also the number
    results, by position.

    `names`: kinds and names of the tensors among `arguments`.  `module` returns an output for each of `layouts`, then the new
    values of the tensors at the positions `written`.  `source`: the program with this part.  Raises the errors of `retrace`.
    """
    fakes = tuple([argument for argument in arguments if isinstance(argument, torch.Tensor)])
    numbers: dict[int, Any] = {}

    def run(*inputs: torch.Tensor) -> tuple[Any, ...]:
        remaining = iter(inputs)
        values = [next(remaining) if isinstance(argument, torch.Tensor) else argument for argument in arguments]
        results = Replacing(module, source).run(*values, enable_io_processing=False)
        outputs = []
        for number, (result, layout) in enumerate(zip(results, layouts, strict=False)):
            if isinstance(result, torch.Tensor):
                dense = dense_strides(tuple(result.shape), result.stride())
                outputs.append(with_strides(result, dense if isinstance(layout, str) else layout))
            else:
                numbers[number] = result
        return (*outputs, *results[len(layouts) :])

    with mode, torch.no_grad(), torch.fx.traceback.preserve_node_meta(), unchecked_puts(source):
        traced = make_fx(torch.func.functionalize(run, remove="mutations"), decomposition_table=decompositions())(*fakes)
    _check(traced)
    copy_back(traced, written)
    return Retraced(graph=traced, tensors=fakes, names=tuple(names), written=tuple(written), mode=mode, program=source), numbers


def _check(traced: torch.fx.GraphModule) -> None:
    """Raises an error if the graph has random numbers of torch's generator, writes to inputs, control flow or constants."""
    random: list[str] = []
    constant_names: list[str] = []
    branches: list[str] = []
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            (branches if isinstance(getattr(traced, node.target), torch.nn.Module) else constant_names).append(node.target)
        tags = getattr(node.target, "tags", ())
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in tags:
            random.append(named_node(node))
    if random:
        raise ModelError("random-operation", f"random numbers: {', '.join(dict.fromkeys(random))}")
    if stray := [n for n in traced.graph.find_nodes(op="placeholder") if any(u.target is COPY and u.args[0] is n for u in n.users)]:
        raise BuildError("lowering-broken", f"the program still writes to {stray[0].name} after functionalization")
    if branches:
        raise ModelError("operator-without-kernel", f"control flow that depends on data: {', '.join(branches)}")
    if constant_names:
        raise ModelError("constant-unknown", f"the program contains constant tensors: {', '.join(constant_names)}")
