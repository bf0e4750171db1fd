"""Compile the candidates of every product and convolution of some models for a target, without a GPU: `prepare.py ARCH OUT
[MODEL ...]`.  Part one of three of `make tune`: measure.py times them on the GPU, table.py makes the table.

A piece is one operation as a model's graph holds it (shapes, strides, dtypes), with one configuration: its kernel image and how
it is launched.  OUT is a pickle that only these programs read.  MODEL: of tuned_models.py, default all.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

from cgcompile.errors import BuildError
from cgcompile.offline.compile.kernels import compile_variants
from cgcompile.offline.decompose.retrace import Retraced, retrace
from cgcompile.offline.lower.fake_device import fake_device
from cgcompile.offline.lower.inductor import lower_graph
from cgcompile.offline.lowered import Launch, Lowered, Pointer
from cgcompile.offline.tuning import cost_model
from cgcompile.offline.tuning.cost_model import Candidate, Problem
from cgcompile.targets.architectures import Arch, arch
from cgcompile.util.content_cache import cache_folder
from tests.bench.tuning import tuned_models

OPERATIONS = (
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
)  # fmt: skip

MOST = 10
"""Candidates of a problem that are tried: those that the model of cost likes best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A problem with one configuration, as launches: (image, symbol, grid, threads, shared, layout, params, arguments), where an
    argument is ("ptr", bytes) or a number.  `bytes` that the operation reads and writes at least."""

    problem: Problem
    candidate: Candidate
    launches: tuple[Any, ...]
    nbytes: int


def main(name: str, out: str, *models: str) -> None:
    """Writes the pieces."""
    target = arch(name)
    graphs: dict[str, Retraced] = {}
    with fake_device(target):
        for model in models or tuple(tuned_models.MODELS):
            for program, tensors in tuned_models.calls(model):
                for text, graph in operations(retrace(program, tensors)):
                    graphs.setdefault(text, graph)
        print(f"{len(graphs)} operations", flush=True)
        traced = [each for graph in graphs.values() for each in candidates(graph, target)]
    print(f"{len(traced)} pieces", flush=True)
    variants = list(dict.fromkeys(variant for _, _, each in traced for variant in each.variants))
    made = compile_all(variants, target)
    pieces = [piece(problem, candidate, each, made) for problem, candidate, each in traced if all(v in made for v in each.variants)]
    Path(out).write_bytes(pickle.dumps([(p.problem, p.candidate, p.launches, p.nbytes) for p in pieces]))
    print(f"{out}: {len(pieces)} pieces, {Path(out).stat().st_size / 1e6:.1f} MB")


def operations(retraced: Retraced) -> Any:
    """(description, graph of this operation alone) for every product and convolution."""
    for node in retraced.graph.graph.nodes:
        if node.op != "call_function" or node.target not in OPERATIONS:
            continue
        graph = torch.fx.Graph()
        values: list[torch.Tensor] = []

        def given(argument: torch.fx.Node, graph: torch.fx.Graph = graph, values: list[torch.Tensor] = values) -> torch.fx.Node:
            placeholder = graph.placeholder(f"x{len(values)}")
            placeholder.meta["val"] = argument.meta["val"]
            values.append(argument.meta["val"])
            return placeholder

        made = graph.call_function(node.target, torch.fx.map_arg(node.args, given), torch.fx.map_arg(node.kwargs, given))
        made.meta["val"] = node.meta["val"]
        graph.output((made,))
        text = f"{node.target} {[(tuple(v.shape), v.stride(), v.dtype) for v in values]} {node.args} {node.kwargs}"
        text = text if node.target is torch.ops.aten.convolution.default else text.partition("] ")[0]
        yield text, alone(graph, values, retraced)
        if node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            yield from split(values[-2], values[-1], retraced)


def alone(graph: torch.fx.Graph, values: list[torch.Tensor], retraced: Retraced) -> Retraced:
    """A graph of one operation on placeholders for `values`."""
    names = tuple(("input", str(index)) for index in range(len(values)))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    return Retraced(graph=module, tensors=tuple(values), names=names, written=(), mode=retraced.mode, program=retraced.program)


def split(a: torch.Tensor, b: torch.Tensor, retraced: Retraced) -> Any:
    """The product with its inner axis cut into pieces whose partial sums stay float32, where it has too few blocks for the GPU."""
    (m, k), n = a.shape, b.shape[1]
    for pieces in (2, 4, 8):
        if k % (16 * pieces) or k // pieces < 64 or -(-m // 32) * -(-n // 64) > 264:
            continue
        part = k // pieces
        with retraced.mode:
            left = torch.empty_strided((pieces, m, part), (part * a.stride(1), *a.stride()), dtype=a.dtype, device=a.device)
            right = torch.empty_strided((pieces, part, n), (part * b.stride(0), *b.stride()), dtype=b.dtype, device=b.device)
            made = torch.empty((pieces, m, n), dtype=torch.float32, device=a.device)
        graph = torch.fx.Graph()
        given = []
        for index, value in enumerate((left, right)):
            given.append(graph.placeholder(f"x{index}"))
            given[-1].meta["val"] = value
        if a.dtype == torch.float32:
            node = graph.call_function(torch.ops.aten.bmm.default, tuple(given))
        else:
            node = graph.call_function(torch.ops.aten.bmm.dtype, (*given, torch.float32))
        node.meta["val"] = made
        graph.output((node,))
        yield f"split {pieces} {m} {n} {k} {a.stride()} {b.stride()} {a.dtype}", alone(graph, [left, right], retraced)


def candidates(graph: Retraced, target: Arch) -> list[tuple[Problem, Candidate, Lowered]]:
    """The operation lowered with each configuration."""
    offered: dict[Problem, Sequence[Candidate]] = {}

    def first(problem: Problem, given: Sequence[Candidate], arch: Arch, table: Any = None) -> tuple[int, str]:
        offered.setdefault(problem, tuple(given))
        return cost_model.choose(problem, given, arch)

    try:
        lowered(graph, target, first)
    except BuildError as error:
        print(f"  left out: {error}", flush=True)
        return []
    found = []
    for problem, given in offered.items():
        fitting = [index for index, each in enumerate(given) if cost_model.fits(problem, each, target)]
        fitting.sort(key=lambda index: cost_model.cost(problem, given[index], target))
        for index in fitting[:MOST]:
            found.append((problem, given[index], lowered(graph, target, partial(always, given[index]))))
    return found


def always(candidate: Candidate, problem: Problem, listed: Sequence[Candidate], arch: Arch) -> tuple[int, str]:
    """`cost_model.choose` that has no choice."""
    return list(listed).index(candidate), "measured"


def lowered(graph: Retraced, target: Arch, choose: Any) -> Lowered:
    """`inductor.lower_key` from the graph on."""
    return lower_graph(graph, (), target, (), choose)[0]


def compile_all(variants: list[Any], target: Arch) -> dict[Any, Any]:
    """Variant -> compiled.  All at once; where one cannot be compiled, one by one, and that one is left out."""
    compiled = partial(
        compile_variants, arch=target.name, shared_limit=target.shared_optin, cache=cache_folder(), tell=lambda text: None
    )
    start, made = time.monotonic(), {}
    try:
        made = dict(zip(variants, compiled(variants), strict=True))
    except BuildError as error:
        print(f"  one by one, because of {type(error).__name__}: {error}", flush=True)
        for variant in variants:
            try:
                (made[variant],) = compiled([variant])
            except BuildError as each:
                print(f"  left out: {each}", flush=True)
    print(f"compiled {len(made)} of {len(variants)} kernels in {time.monotonic() - start:.0f} s", flush=True)
    return made


def piece(problem: Problem, candidate: Candidate, traced: Lowered, made: dict[Any, Any]) -> Piece:
    """What the measuring program needs of it."""
    launches = []
    for event in traced.events:
        if not isinstance(event, Launch):
            continue
        compiled = made[traced.variants[event.variant]]
        arguments = [("ptr", traced.buffers[each.buffer].nbytes) if isinstance(each, Pointer) else each for each in event.arguments]
        how = (event.grid, compiled.threads, compiled.shared, compiled.layout, compiled.params, arguments)
        launches.append((compiled.image, compiled.symbol, *how))
    return Piece(
        problem=problem, candidate=candidate, launches=tuple(launches), nbytes=sum(buffer.nbytes for buffer in traced.buffers)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
