"""A hand-written engine: a decoder with a paged cache. `torch.cuda.graph` captures a graph for each number of lanes.

`python -m tests.gpu.helpers.engine ROLE FOLDER` runs one process of the engine. `save` captures graphs and saves them to FOLDER,
`attach` attaches the saved graphs, `capture` only captures, for comparison. The last line of its output is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cgbundle
import cgcompile

if __name__ == "__main__" and sys.argv[1] == "save":
    cgcompile.observe()

import torch
import triton
import triton.language as tl

LANES = (32, 8, 1)
LAYERS, WIDTH, HEADS, VOCABULARY = 4, 1024, 8, 8192
PAGE, PAGES, PER_LANE = 16, 160, 4
LENGTH = PAGE * PER_LANE
"""Number of tokens after which a lane starts again at position 0."""


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(out, x, weight, width: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0), tl.arange(0, width)
    values = tl.load(x + row * width + at).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + 1e-6)
    tl.store(out + row * width + at, (values * scale * tl.load(weight + at).to(tl.float32)).to(tl.bfloat16))


@triton.jit  # type: ignore[untyped-decorator]
def follow_kernel(out, table, count: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums the values at the addresses in a table."""
    at = tl.arange(0, count)
    values = tl.load(tl.load(table + at).to(tl.pointer_type(tl.float32)))
    tl.store(out, tl.sum(values))


@triton.jit  # type: ignore[untyped-decorator]
def early_kernel(out, x, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Doubles the output of the previous kernel, and lets the next kernel start long before this one ends."""
    at = tl.arange(0, width)
    tl.extra.cuda.gdc_wait()
    values = tl.load(x + at)
    tl.extra.cuda.gdc_launch_dependents()
    for _ in range(20_000):
        values = tl.sqrt_rn(values * values)
    tl.store(out + at, values * 2)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    norm_kernel[(x.shape[0],)](out, x, weight, WIDTH)
    return out


@torch.compile(dynamic=False)  # type: ignore[untyped-decorator]
def gated(x: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, -1)
    return torch.nn.functional.silu(one) * two


def weights() -> dict[str, torch.Tensor]:
    """Returns random weights, the same in every process."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, WIDTH), "head": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"{layer}.qkv": (3 * WIDTH, WIDTH), f"{layer}.out": (WIDTH, WIDTH), f"{layer}.norm": (WIDTH,),
            f"{layer}.up": (4 * WIDTH, WIDTH), f"{layer}.down": (WIDTH, 2 * WIDTH),
        }  # fmt: skip
    tensors = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.03 for name, shape in shapes.items()}
    return {name: tensor + 1 if name.endswith("norm") else tensor for name, tensor in tensors.items()}


class Engine:
    """Weights, which engines may share, and the cache and lanes of this engine."""

    def __init__(self, held: dict[str, torch.Tensor], pages: int = PAGES) -> None:
        self.weights, most = held, max(LANES)
        shape = (2, pages, PAGE, HEADS, WIDTH // HEADS)
        self.cache = {f"cache.{layer}": torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for layer in range(LAYERS)}
        self.tokens = torch.arange(most, device="cuda") * 7 + 3
        self.positions = torch.arange(most, device="cuda") % LENGTH
        order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))[: most * PER_LANE]
        self.pages = order.view(most, PER_LANE).cuda()
        self.graphs: dict[Any, Any] = {}
        self.logits: dict[str, torch.Tensor] = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors that the graphs read and write, except their outputs."""
        return {**self.weights, **self.cache, "tokens": self.tokens, "positions": self.positions, "pages": self.pages}

    def step(self, lanes: int) -> torch.Tensor:
        """Computes one token for each of the first lanes and returns the logits."""
        w, linear = self.weights, torch.nn.functional.linear
        tokens, positions, pages = self.tokens[:lanes], self.positions[:lanes], self.pages[:lanes]
        x = torch.nn.functional.embedding(tokens, w["embedding"])
        page = pages.gather(1, (positions // PAGE)[:, None]).squeeze(1)
        mask = torch.arange(LENGTH, device="cuda")[None] <= positions[:, None]
        for layer in range(LAYERS):
            query, key, value = linear(norm(x, w[f"{layer}.norm"]), w[f"{layer}.qkv"]).view(lanes, 3, HEADS, -1).unbind(1)
            keys, values = self.cache[f"cache.{layer}"]
            keys.index_put_((page, positions % PAGE), key)
            values.index_put_((page, positions % PAGE), value)
            seen = [cache[pages].view(lanes, LENGTH, HEADS, -1).transpose(1, 2) for cache in (keys, values)]
            attention = torch.nn.functional.scaled_dot_product_attention(query[:, :, None], *seen, attn_mask=mask[:, None, None])
            x = x + linear(attention.reshape(lanes, WIDTH), w[f"{layer}.out"])
            x = x + linear(gated(linear(x, w[f"{layer}.up"])), w[f"{layer}.down"])
        logits = linear(norm(x, w["norm"]), w["head"])
        tokens.copy_(logits.argmax(-1))
        positions.copy_((positions + 1) % LENGTH)
        return logits

    def capture(self) -> None:
        """Captures a graph for each number of lanes in one pool, and restores the state."""
        kept = {name: tensor.clone() for name, tensor in self.tensors().items() if name not in self.weights}
        pool = torch.cuda.graph_pool_handle()
        for lanes in LANES:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.no_grad(), torch.cuda.stream(side):
                for _ in range(2):
                    self.step(lanes)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.no_grad(), torch.cuda.graph(graph, pool=pool):
                self.logits[f"logits/{lanes}"] = self.step(lanes)
            self.graphs[lanes] = graph
        for name, tensor in kept.items():
            self.tensors()[name].copy_(tensor)
        torch.cuda.synchronize()


def age() -> float:
    """Returns the seconds since the start of this process."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def refusal(call: Callable[[], Any]) -> str:
    """Returns the code and message of the error that a call raises, or ""."""
    try:
        call()
    except cgbundle.CgbundleError as error:
        return f"{error.code}: {error}"
    return ""


def small_graphs() -> dict[str, Callable[[], tuple[dict[Any, torch.cuda.CUDAGraph], dict[str, torch.Tensor]]]]:
    """Returns, by name, functions that return graphs and tensors. `save_graphs` must refuse most of them. `kept` keeps their memory
    alive."""
    x, y = torch.ones(64, device="cuda"), torch.zeros((), device="cuda")
    kept.append((x, y))

    def captured(call: Callable[[], Any], keep: bool = True) -> torch.cuda.CUDAGraph:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True) if keep else torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept.append(call())
        return graph

    table = x.data_ptr() + 4 * torch.arange(64, device="cuda")

    def follow() -> None:
        follow_kernel[(1,)](y, table, 64)

    def pools() -> tuple[Any, Any]:
        graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        tensors = {"x": x}
        for key in ("double", ("square", 2)):
            graphs[key] = captured(lambda key=key: x * 2 if key == "double" else (x + 3) ** 2)
            tensors[str(key)] = kept[-1]
        return graphs, tensors

    def filled() -> tuple[Any, Any]:
        """The second graph reads memory of the capture pool that no graph writes, only the engine."""
        first, second = [torch.cuda.CUDAGraph(keep_graph=True) for _ in range(2)]
        with torch.cuda.graph(first):
            held = torch.empty_like(x)
            kept.append((held, x * 2))
        held.fill_(3)
        with torch.cuda.graph(second, pool=first.pool()):
            y.copy_((held * x).sum())
        return {1: first, 2: second}, {"x": x, "y": y}

    def early() -> torch.Tensor:
        """The second kernel may start early, the third may not."""
        first, second = torch.empty_like(x), torch.empty_like(x)
        early_kernel[(1,)](first, x, 64, launch_pdl=True)
        early_kernel[(1,)](second, first, 64, launch_pdl=True)
        kept.extend([first, second])
        return second + 1

    def programmatic() -> tuple[Any, Any]:
        graphs = {"early": captured(early)}
        return graphs, {"x": x, "out": kept[-1]}

    return {
        "pools": pools,
        "programmatic": programmatic,
        "filled": filled,
        "unverified": lambda: ({1: captured(lambda: x * 2)}, {"x": x, "double": kept[-1]}),
        "table": lambda: ({1: captured(follow)}, {"x": x, "y": y, "table": table}),
        "unnamed": lambda: ({1: captured(lambda: y.copy_(x.sum()))}, {"y": y}),
        "random": lambda: ({1: captured(lambda: y.copy_(torch.rand((), device="cuda")))}, {"y": y}),
        "host": lambda: ({1: captured(lambda: y.copy_(pinned, non_blocking=True))}, {"y": y}),
        "forgotten": lambda: ({1: captured(lambda: x * 2, keep=False)}, {"x": x}),
    }


kept: list[Any] = []
pinned = torch.ones(()).pin_memory() if torch.cuda.is_available() else torch.ones(())


def save(folder: Path) -> dict[str, Any]:
    engine = Engine(weights())
    engine.capture()
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    begun = time.perf_counter()
    saved = cgcompile.save_graphs(engine.graphs, {**engine.tensors(), **engine.logits}, folder / "engine.cgb")
    answer: dict[str, Any] = {"kind": saved.kind, "nodes": saved.nodes, "images": saved.images, "arena": saved.arena}
    answer["seconds"] = time.perf_counter() - begun
    pairs = [(tensor, before[name]) for name, tensor in engine.tensors().items()]
    answer["restored"] = all(torch.equal(now.view(torch.int16), old.view(torch.int16)) for now, old in pairs)
    answer["refused"] = {}
    for name, make in small_graphs().items():
        graphs, tensors = make()
        answer["refused"][name] = refusal(
            lambda g=graphs, t=tensors, n=name: cgcompile.save_graphs(g, t, folder / f"{n}.cgb", verify=n != "unverified")
        )
    answer["start"] = engine.weights["head"].data_ptr()
    return answer


def attach(folder: Path, steps: int) -> dict[str, Any]:
    shift = torch.zeros(77 << 20, dtype=torch.uint8, device="cuda")  # changes the addresses of later tensors
    engine = Engine(weights())
    ready = age()
    graphs = cgbundle.attach(folder / "engine.cgb", engine.tensors())
    attached = age() - ready
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    torch.cuda.synchronize()
    begun = age()
    graphs[8].replay()
    torch.cuda.synchronize()
    answer: dict[str, Any] = {"first": age(), "attach": attached, "replay": age() - begun, "memory": dict(graphs.memory)}
    for name, tensor in before.items():
        engine.tensors()[name].copy_(tensor)
    other = Engine(engine.weights)
    begun = age()
    other.capture()
    answer["capture"] = age() - begun
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for number in range(steps):
        lanes = LANES[number % len(LANES)]
        graphs[lanes].replay()
        other.graphs[lanes].replay()
        pairs = [(graphs.tensors[f"logits/{lanes}"], other.logits[f"logits/{lanes}"]), (engine.tokens, other.tokens)]
        for attached_value, captured_value in pairs:
            same &= (attached_value.view(torch.int16) == captured_value.view(torch.int16)).all()
    answer["same"] = bool(same) and all(
        torch.equal(tensor.view(torch.int16), other.tensors()[name].view(torch.int16)) for name, tensor in engine.tensors().items()
    )
    answer["moved"] = bool((engine.positions != before["positions"]).any())
    for name, call in (("attached", graphs), ("captured", other.graphs)):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(200):
            call[8].replay()
        answer[f"launch_{name}"] = (time.perf_counter() - begun) / 200 * 1e6
        torch.cuda.synchronize()
        answer[f"step_{name}"] = (time.perf_counter() - begun) / 200 * 1e6
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        graphs[1].replay()
    side.synchronize()
    tensors = engine.tensors()
    smaller = Engine(engine.weights, PAGES // 2)
    turned = {**tensors, "head": tensors["head"].t().contiguous().t()}
    changed = folder / "changed.cgb"
    edited(folder / "engine.cgb", changed)
    answer["refused"] = {
        "cache": refusal(lambda: cgbundle.attach(folder / "engine.cgb", smaller.tensors())),
        "layout": refusal(lambda: cgbundle.attach(folder / "engine.cgb", turned)),
        "missing": refusal(lambda: cgbundle.attach(folder / "engine.cgb", {})),
        "driver": refusal(lambda: cgbundle.attach(changed, tensors)),
        "unverified": refusal(lambda: cgbundle.attach(folder / "unverified.cgb", {"x": torch.ones(64, device="cuda")})),
    }
    answer["pools"] = attach_pools(folder)
    answer["early"] = attach_early(folder)
    answer["start"] = engine.weights["head"].data_ptr()
    graphs.close()
    del shift
    return answer


def attach_pools(folder: Path) -> bool:
    """Returns whether graphs of two pools keep their outputs in separate memory."""
    x = torch.arange(64, device="cuda", dtype=torch.float32)
    with cgbundle.attach(folder / "pools.cgb", {"x": x}) as graphs:
        for key in graphs:
            graphs[key].replay()
        double, square = [graphs.tensors[str(key)].clone() for key in graphs]
    with cgbundle.attach(folder / "unverified.cgb", {"x": x}, unverified=True) as graphs:
        graphs[1].replay()
        again = graphs.tensors["double"].clone()
    return torch.equal(double, x * 2) and torch.equal(square, (x + 3) ** 2) and torch.equal(again, double)


def attach_early(folder: Path) -> list[int]:
    """Returns the types of the edges of graph "early", whose second kernel may start early; [] if the output is wrong."""
    from cgbundle.format.archive import Archive
    from cgbundle.format.table import Table

    x = torch.arange(64, device="cuda", dtype=torch.float32)
    with cgbundle.attach(folder / "programmatic.cgb", {"x": x}) as graphs:
        graphs["early"].replay()
        same = torch.equal(graphs.tensors["out"], 4 * x + 1)
    return list(Table(Archive(str(folder / "programmatic.cgb")).data("graphs/0.bin")).edge_type) if same else []


def edited(source: Path, target: Path) -> None:
    """Copies a bundle and changes the driver version in it."""
    import shutil
    from dataclasses import replace

    from cgbundle.format.archive import read_manifest
    from cgcompile.bundle import manifest_text

    shutil.copytree(source, target)
    manifest = read_manifest(str(source))
    manifest = replace(manifest, target=replace(manifest.target, driver=manifest.target.driver - 10))
    (target / "manifest.json").write_bytes(manifest_text.encode(manifest))


def capture() -> dict[str, Any]:
    engine = Engine(weights())
    ready = age()
    engine.capture()
    engine.graphs[8].replay()
    torch.cuda.synchronize()
    return {"first": age(), "capture": age() - ready}


def main(arguments: list[str]) -> int:
    role, folder = arguments[0], Path(arguments[1])
    try:
        answer = {"save": save, "attach": lambda path: attach(path, 1000), "capture": lambda path: capture()}[role](folder)
    except cgbundle.CgbundleError as error:
        traceback.print_exc()
        answer = {"error": f"{error.code}: {error}"}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
