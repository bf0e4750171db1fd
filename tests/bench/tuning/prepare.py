"""Compiles the candidates of every product and convolution of some models for a target, without a GPU: `prepare.py ARCH OUT [--part
I/N] [--seconds S] [MODEL ...]`.  Part one of three of `make tune`: measure.py times the candidates on a GPU, table.py writes the
table.

A piece is one operation of a model's graph (shapes, strides, dtypes) with the pointwise operations that follow it, in one
configuration: its kernel image and launch parameters. OUT is a pickle that only these programs read. MODEL: a name in
tuned_models.py, default all; `gpt-bf16@8,32` selects sizes of the first dimension. `--part`: every N-th operation from I on.
`--seconds`: no compilation starts after that; the candidates that the cost model ranks highest come first.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from cgcompile.offline.tuning.cost_model import Candidate, Problem, Table
from cgcompile.offline.tuning.measurements import read_table, table_file
from cgcompile.targets.architectures import Arch, arch
from cgcompile.util.content_cache import cache_folder
from tests.bench.tuning import tuned_models

OPERATIONS = (
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
)  # fmt: skip

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten.permute.default, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
    aten.expand.default, torch.ops.prims.convert_element_type.default, aten._to_copy.default)  # fmt: skip
"""Operations that a kernel fuses in addition to pointwise ones."""

MOST = 16
"""Number of candidates that are tried for a problem: the best ones by the cost model, in addition to LIKELY."""

WIDE = [
    Candidate(block_m=m, block_n=n, block_k=k, stages=stages, warps=warps, group=8)
    for blocks, depths, pipelines in (
        (((64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 64), (128, 256), (256, 128)), (32, 64, 128), (2, 3, 4, 5)),
        (((16, 32), (16, 64), (16, 128), (32, 32), (32, 64), (32, 128)), (64, 128, 256), (3, 4, 5, 6)),
    )
    for (m, n), k, stages, warps in itertools.product(blocks, depths, pipelines, (4, 8))
]
"""Candidates in addition to Inductor's configurations."""

LIKELY = frozenset({(128, 256, 64, 3, 8), (128, 256, 64, 4, 8), (256, 128, 64, 3, 8), (128, 128, 64, 3, 4), (128, 128, 64, 4, 8)})
"""Blocks, stages and warps that other compilers choose for large products on this GPU. They are always tried."""

CHUNK = 24
"""Number of kernels that are compiled at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A problem with one configuration, as launches: (image, symbol, grid, threads, shared, layout, params, arguments). An argument
    is ("ptr", bytes) or a number. `nbytes` is the least number of bytes that the operation reads and writes."""

    problem: Problem
    candidate: Candidate
    launches: tuple[Any, ...]
    nbytes: int


def main(name: str, out: str, part: str, seconds: float, models: Sequence[str]) -> None:
    target, start = arch(name), time.monotonic()
    first, step = map(int, part.split("/"))
    graphs: dict[str, Retraced] = {}
    with fake_device(target):
        for model in models or tuple(tuned_models.MODELS):
            for program, tensors in tuned_models.calls(model):
                for text, graph in operations(retrace(program, tensors)):
                    graphs.setdefault(text, graph)
        selected = list(graphs.values())[first::step]
        print(f"{len(selected)} of {len(graphs)} operations", flush=True)
        path = table_file(name)
        table = read_table(path) if path else {}
        traced = sorted([candidate for graph in selected for candidate in candidates(graph, target, table)], key=lambda row: row[0])
    print(f"{len(traced)} pieces after {time.monotonic() - start:.0f} s", flush=True)
    variants = list(dict.fromkeys(variant for _, _, _, plan in traced for variant in plan.variants))
    cubins: dict[Any, Any] = {}
    for at in range(0, len(variants), CHUNK):
        if time.monotonic() - start < seconds:
            cubins |= compile_all(variants[at : at + CHUNK], target, 1 if step > 1 else None)
    pieces = [
        piece(problem, candidate, plan, cubins) for _, problem, candidate, plan in traced if all(v in cubins for v in plan.variants)
    ]
    Path(out).write_bytes(pickle.dumps([(p.problem, p.candidate, p.launches, p.nbytes) for p in pieces]))
    print(f"{out}: {len(pieces)} pieces, {Path(out).stat().st_size / 1e6:.1f} MB, {time.monotonic() - start:.0f} s", flush=True)


def operations(retraced: Retraced) -> Any:
    """Yields (description, graph) for every product and convolution. The graph also has the operations that may be fused after
    it."""
    order = {node: place for place, node in enumerate(retraced.graph.graph.nodes)}
    for node in retraced.graph.graph.nodes:
        if node.op != "call_function" or node.target not in OPERATIONS:
            continue
        graph = torch.fx.Graph()
        values: list[torch.Tensor] = []
        copies: dict[torch.fx.Node, torch.fx.Node] = {}

        def copied(argument: torch.fx.Node, graph: Any = graph, values: Any = values, copies: Any = copies) -> torch.fx.Node:
            if argument not in copies:
                copies[argument] = graph.placeholder(f"x{len(values)}")
                copies[argument].meta["val"] = argument.meta["val"]
                values.append(argument.meta["val"])
            return copies[argument]

        together = [node, *epilogue(node, order)]
        for part in together:  # placeholders come first in a graph
            for argument in part.all_input_nodes:
                if argument not in together:
                    copied(argument)
        for part in together:
            copy = graph.call_function(part.target, torch.fx.map_arg(part.args, copied), torch.fx.map_arg(part.kwargs, copied))
            copy.meta["val"] = part.meta["val"]
            copies[part] = copy
        results = [part for part in together if any(user not in together for user in part.users)]
        graph.output(tuple([copies[result] for result in results]))
        plain = [[a for a in part.args if not isinstance(a, torch.fx.Node)] for part in together]
        text = " ".join([f"{part.target} {args}" for part, args in zip(together, plain, strict=True)])
        yield f"{text} {[(tuple(v.shape), v.stride(), v.dtype) for v in values]}", alone(graph, values, retraced)
        if node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = [argument.meta["val"] for argument in node.args[-2:] if isinstance(argument, torch.fx.Node)]
            yield from split(left, right, retraced)


def epilogue(node: torch.fx.Node, order: Any) -> list[torch.fx.Node]:
    """Returns the pointwise operations and views that follow `node` and whose other inputs are computed before it, in order."""
    chain = [node]
    for successor in list(order)[order[node] + 1 :]:
        fused = torch.Tag.pointwise in getattr(successor.target, "tags", ()) or successor.target in VIEWS
        inner = [argument for argument in successor.all_input_nodes if argument in chain]
        if fused and inner and all(argument in chain or order[argument] < order[node] for argument in successor.all_input_nodes):
            chain.append(successor)
    return chain[1:]


def alone(graph: torch.fx.Graph, values: list[torch.Tensor], retraced: Retraced) -> Retraced:
    """Returns a graph of one operation, with placeholders for `values`."""
    names = tuple(("input", str(index)) for index in range(len(values)))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    return Retraced(graph=module, tensors=tuple(values), names=names, written=(), mode=retraced.mode, program=retraced.program)


def split(a: torch.Tensor, b: torch.Tensor, retraced: Retraced) -> Any:
    """Yields the product with its inner axis split and float32 partial sums, if it has too few blocks for the GPU."""
    (m, k), n = a.shape, b.shape[1]
    for pieces in (2, 4, 8):
        if k % (16 * pieces) or k // pieces < 64 or -(-m // 32) * -(-n // 64) > 264:
            continue
        part = k // pieces
        with retraced.mode:
            left = torch.empty_strided((pieces, m, part), (part * a.stride(1), *a.stride()), dtype=a.dtype, device=a.device)
            right = torch.empty_strided((pieces, part, n), (part * b.stride(0), *b.stride()), dtype=b.dtype, device=b.device)
            product = torch.empty((pieces, m, n), dtype=torch.float32, device=a.device)
        graph = torch.fx.Graph()
        operands = []
        for index, value in enumerate((left, right)):
            operands.append(graph.placeholder(f"x{index}"))
            operands[-1].meta["val"] = value
        if a.dtype == torch.float32:
            node = graph.call_function(torch.ops.aten.bmm.default, tuple(operands))
        else:
            node = graph.call_function(torch.ops.aten.bmm.dtype, (*operands, torch.float32))
        node.meta["val"] = product
        graph.output((node,))
        yield f"split {pieces} {m} {n} {k} {a.stride()} {b.stride()} {a.dtype}", alone(graph, [left, right], retraced)


def candidates(graph: Retraced, target: Arch, table: Table) -> list[tuple[int, Problem, Candidate, Lowered]]:
    """Lowers the operation with each configuration. The first number of a row is the rank: lower ranks are compiled first.
    Configurations of the old table come first, because its rows are replaced."""
    offered: dict[Problem, Sequence[Candidate]] = {}

    def first(problem: Problem, listed: Sequence[Candidate], arch: Arch, table: Any = None) -> tuple[int, str]:
        offered.setdefault(problem, tuple(listed))
        return cost_model.choose(problem, listed, arch)

    try:
        lowered(graph, target, first)
    except BuildError as error:
        print(f"  left out: {error}", flush=True)
        return []
    lowerings = []
    for problem, proposals in offered.items():
        known = [candidate for candidate, _ in table.get(problem, ())]
        more = [replace(tile, group=0) if problem.kind == "conv" else tile for tile in WIDE]
        offers = dict.fromkeys(
            [*known, *proposals, *(tile for tile in more if tile.block_m <= 2 * problem.m and tile.block_n <= 2 * problem.n)]
        )
        fitting = [offer for offer in offers if cost_model.fits(problem, offer, target)]
        fitting.sort(key=lambda tile: cost_model.cost(problem, tile, target))
        likely = [tile for tile in fitting if (tile.block_m, tile.block_n, tile.block_k, tile.stages, tile.warps) in LIKELY]
        others = [tile for tile in fitting if tile not in likely and tile not in known]
        for rank, candidate in enumerate(dict.fromkeys([*known, *others[:4], *likely, *others[4:MOST]])):
            try:
                lowerings.append((rank, problem, candidate, lowered(graph, target, partial(always, candidate), (candidate,))))
            except BuildError as error:
                print(f"  left out: {candidate}: {error}", flush=True)
    return lowerings


def always(candidate: Candidate, problem: Problem, listed: Sequence[Candidate], arch: Arch) -> tuple[int, str]:
    """Replaces `cost_model.choose`: always returns the given candidate."""
    return list(listed).index(candidate), "measured"


def lowered(graph: Retraced, target: Arch, choose: Any, more: Sequence[Candidate] = ()) -> Lowered:
    """Does what `inductor.lower_key` does after the graph was created."""
    return lower_graph(graph, (), target, (), choose, lambda problem: more)[0]


def compile_all(variants: list[Any], target: Arch, workers: int | None) -> dict[Any, Any]:
    """Returns variant -> compiled kernel. Compiles all at once; if that fails, one by one, without the ones that fail."""
    compiled = partial(
        compile_variants, arch=target.name, shared_limit=target.shared_optin, cache=cache_folder(), workers=workers,
        tell=lambda text: None,
    )  # fmt: skip
    start, cubins = time.monotonic(), {}
    try:
        cubins = dict(zip(variants, compiled(variants), strict=True))
    except BuildError as error:
        print(f"  one by one, because of {type(error).__name__}: {error}", flush=True)
        for variant in variants:
            try:
                (cubins[variant],) = compiled([variant])
            except BuildError as failure:
                print(f"  left out: {failure}", flush=True)
    print(f"compiled {len(cubins)} of {len(variants)} kernels in {time.monotonic() - start:.0f} s", flush=True)
    return cubins


def piece(problem: Problem, candidate: Candidate, traced: Lowered, cubins: dict[Any, Any]) -> Piece:
    """Returns the data that the measuring program needs."""
    launches = []
    for event in traced.events:
        if not isinstance(event, Launch):
            continue
        compiled = cubins[traced.variants[event.variant]]
        arguments = [
            ("ptr", traced.buffers[argument.buffer].nbytes) if isinstance(argument, Pointer) else argument
            for argument in event.arguments
        ]
        how = (event.grid, compiled.threads, compiled.shared, compiled.layout, compiled.params, arguments)
        launches.append((compiled.image, compiled.symbol, *how))
    return Piece(
        problem=problem, candidate=candidate, launches=tuple(launches), nbytes=sum(buffer.nbytes for buffer in traced.buffers)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("arch")
    parser.add_argument("out")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("models", nargs="*")
    options = parser.parse_intermixed_args()
    main(options.arch, options.out, options.part, options.seconds, options.models)
