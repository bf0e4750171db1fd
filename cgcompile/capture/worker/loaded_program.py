"""Runs in a recorder process: loads the program, places its memory, lowers, warms up, and captures every key.

Private torch interface: `torch._C._cuda_clearCublasWorkspaces` (2.11, 2.13).  torch keeps one cuBLAS workspace per handle and
stream.  Without clearing them, a later key's graph would use a workspace in an earlier key's private pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from cgbundle.format.schema import IntKey, Weight

from ...errors import BuildError, ModelError, named
from ...export.torch_program import on_device
from ...model.load import load_code
from ...model.source import ROWS
from ...partition.blocks import has_conditionals
from ...targets.compiler_errors import explain
from ...targets.cuda.lowering import choose_without_timing, lower, repair, start_compilers
from ...targets.cuda.tensors import (
    TensorPlace,
    apply_settings,
    place_inputs,
    point_weights,
    tensor_at,
    tensor_place,
    tensors_of,
    weights_at,
)
from ...targets.memory_layout import PAD
from ...util.progress import Tell
from ..request import Call, Request
from .control_flow import Keep, capture_blocks
from .driver import check, driver
from .steps import Steps
from .weights import digests, on_host, upload

Pool = tuple[int, int]
"""torch's id of a private memory pool."""

WARMUPS = 3
SHIFTS = (1 << 20, 34 << 20, 200 << 20)
"""Sizes in bytes of allocations that shift this process's addresses: one for each size class of the driver's address space."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedProgram:
    """The loaded programs.  `modules`: by key; their weights are tensors in the buffer `weights` or, if the programs write to them,
    `state`.  `first`: initial values of state.  `digests`: digests of all weights.  `inputs`: the buffer of the static inputs.
    `split`: by key, programs with host regions, on the GPU; they replace `modules`.  `calls`: (example call, self-test call)."""

    request: Request
    split: Mapping[IntKey, torch.export.ExportedProgram]
    modules: Mapping[IntKey, torch.nn.Module]
    first: Mapping[str, torch.Tensor]
    digests: Mapping[str, int]
    weights: torch.Tensor
    state: torch.Tensor
    inputs: torch.Tensor
    calls: Mapping[IntKey, tuple[Call, Call]]

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of weights, by name of their memory."""
        return {"weights": self.weights, "state": self.state}

    def tensor_of(self, row: Weight) -> torch.Tensor:
        """Returns a weight's tensor in its buffer."""
        buffer = self.state if row.memory == "state" else self.weights
        return tensor_at(buffer, row.offset, row.dtype, row.shape, row.strides)

    def restore(self) -> None:
        """Resets state to its initial values."""
        for name, value in self.first.items():
            self.tensor_of(self.row(name)).copy_(value)

    def row(self, name: str) -> Weight:
        """Returns the row of the weight called `name`."""
        return next(row for row in self.request.weights if row.name == name)

    def mutated(self) -> tuple[str, ...]:
        """Returns names of weights whose bytes changed, and reads these weights from the file again."""
        now = digests(self.request.weights, self.buffers)
        changed = tuple([name for name, digest in now.items() if digest != self.digests[name]])
        upload(self.request.stored, [self.row(name) for name in changed], self.buffers)
        return changed


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A captured region, number `region` of its key, before any replay.  `steps`: one graph, or several with branches and loops
    between them, all in the private pool `pool`.  `inputs`, `outputs`: places of its tensors.  `kept`: those outputs that are
    outputs of the program; holding these tensors keeps their memory allocated."""

    key: IntKey
    region: int
    steps: Steps
    pool: Pool
    inputs: tuple[TensorPlace, ...]
    outputs: tuple[TensorPlace, ...]
    kept: tuple[torch.Tensor, ...]


def settle() -> None:
    """Collects garbage, and excludes all live objects from later collections.  Every part of a capture begins with a collection,
    which would take half a second with the objects of 2000 nodes (two cores)."""
    gc.collect()
    gc.freeze()


def wake(processes: int) -> None:
    """Starts `processes` compile processes of Inductor, and creates the CUDA context.  Neither needs a request."""
    start_compilers(processes)
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes the context current for the driver calls below
    settle()


def load_program(request: Request) -> LoadedProgram:
    """Places weights and static inputs on the GPU, and loads the keys' programs with them.  No weight stays in host memory."""
    apply_settings(request.settings)
    if request.varying:
        choose_without_timing()
    anchor = torch.zeros(1, device="cuda")
    if request.shift:
        for size in SHIFTS:
            check(driver.cuMemAlloc(size))
    if request.code:
        load_code(request.code)
    sizes = (request.weights_end, request.state_end, request.inputs_end)
    weights, state, inputs = [torch.zeros(size + PAD, dtype=torch.uint8, device="cuda") for size in sizes]
    buffers = {"weights": weights, "state": state}
    upload(request.stored, request.weights, buffers)
    placed = weights_at(request.weights, buffers)
    for name in [name for name in placed if request.more and name.startswith(ROWS)]:
        placed[name] += request.more
    tensors = {**placed, **on_host(request.stored, request.weights)}
    modules: dict[Path, torch.nn.Module] = {}
    split: dict[Path, torch.export.ExportedProgram] = {}
    for path in dict.fromkeys(request.programs[key] for key in request.keys):
        program = on_device(torch.export.load(path), anchor.device, tensors)
        if request.placements:
            split[path] = program
            continue
        modules[path] = repair(program.module(check_guards=False))  # the signature's checks run before a replay, not inside it
        point_weights(modules[path], placed)
    calls = torch.load(request.calls, weights_only=False)
    del anchor
    settle()
    torch.cuda.empty_cache()
    return LoadedProgram(
        request=request,
        split={key: split[path] for key, path in request.programs.items() if path in split},
        modules={key: modules[path] for key, path in request.programs.items() if path in modules},
        first={row.name: placed[row.name].clone() for row in request.weights if row.memory == "state"},
        digests=digests(request.weights, buffers),
        weights=weights, state=state, inputs=inputs, calls=calls,
    )  # fmt: skip


def fill_cache(loaded: LoadedProgram, key: IntKey, tell: Tell) -> None:
    """Lowers and runs the program for a key, which fills the compile cache.  Raises lowering-failed."""
    if has_conditionals(loaded.modules[key]):
        tell(f"lowering {key}")
        leaves, _, _ = _placed(loaded, key)
        lower_conditionals(loaded, loaded.modules[key], leaves, f"int_key {key}")
        loaded.restore()
    else:
        warm_up(loaded, key, tell)


def _placed(loaded: LoadedProgram, key: IntKey) -> tuple[list[Any], TreeSpec, list[int]]:
    """Returns the example's flat arguments with tensors in the static inputs, their TreeSpec, and the tensors' positions."""
    leaves, spec = tree_flatten(loaded.calls[key][0])
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for i, tensor in zip(where, place_inputs([leaves[i] for i in where], loaded.inputs), strict=True):
        leaves[i] = tensor
    return leaves, spec, where


def warm_up(loaded: LoadedProgram, key: IntKey, tell: Tell) -> tuple[Callable[[], Any], tuple[torch.Tensor, ...]]:
    """Lowers the program for a key and runs it on a side stream.  Inputs and state that it writes to are reset after every run.
    Returns a function that calls the lowered program without arguments, and its static inputs.  Raises lowering-failed."""
    tell(f"lowering {key}")
    leaves, spec, where = _placed(loaded, key)
    examples, static = tensors_of(loaded.calls[key][0]), [leaves[i] for i in where]
    args, kwargs = tree_unflatten(leaves, spec)
    lowered = lower(loaded.modules[key], loaded.request.level, loaded.request.specialize)

    def call() -> Any:
        return lowered(*args, **kwargs)

    def restore() -> None:
        for i in loaded.request.written[key]:
            static[i].copy_(examples[i])
        loaded.restore()

    run_warm(call, f"int_key {key}, {loaded.request.level}", loaded.request.level, restore)
    return call, tuple(static)


def run_warm(call: Callable[[], Any], where: str, level: str, restore: Callable[[], None] = lambda: None) -> None:
    """Runs a lowered program on a side stream, which compiles it.  Calls `restore` after every run.  Raises lowering-failed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                call()
                restore()
    except BuildError as error:
        raise named(error.code, f"{where}: {error}", error.hint) from error
    except Exception as error:  # compilers raise many types
        failure = explain(error)
        raise ModelError("lowering-failed", f"{where}: {failure}", failure.hint(level)) from error
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def capture(loaded: LoadedProgram, key: IntKey, tell: Tell) -> Captured:
    """Captures the program for a key into a new private pool.  Raises lowering-failed, not-capturable."""
    result: Any
    if has_conditionals(loaded.modules[key]):
        tell(f"lowering and capturing {key}")
        leaves, _, where = _placed(loaded, key)
        static = tuple([leaves[i] for i in where])
        steps, result, pool = capture_conditionals(loaded, loaded.modules[key], leaves, f"int_key {key}")
        loaded.restore()
    else:
        call, static = warm_up(loaded, key, tell)
        tell(f"capturing {key}")
        graph, result = capture_call(call, f"int_key {key}")
        steps, pool = (graph,), graph.pool()
    outputs = tuple(tensors_of(result))
    return Captured(
        key=key,
        region=0,
        steps=steps,
        pool=pool,
        inputs=tuple(map(tensor_place, static)),
        outputs=tuple(map(tensor_place, outputs)),
        kept=outputs,
    )


def capture_call(call: Callable[[], Any], where: str, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Captures a call that ran before.  Returns the graph and the call's result.  `pool`: the private pool of an earlier graph,
    whose free blocks this one may use (default: a new pool).  Raises not-capturable."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    try:
        with torch.no_grad(), torch.cuda.graph(graph, pool=pool):
            result = call()
    except RuntimeError as error:
        raise ModelError("not-capturable", f"{where}: {_first_line(error)}") from error
    torch._C._cuda_clearCublasWorkspaces()
    return graph, result


def capture_conditionals(
    loaded: LoadedProgram, module: GraphModule, leaves: Sequence[Any], where: str, pool: Pool | None = None
) -> tuple[Steps, list[Any], Pool]:
    """Captures a module with branches or loops for its flat arguments; see `capture_blocks`.  `pool`: as in `capture_call`.
    Returns the steps, the results, and the pool.  Raises lowering-failed, not-capturable."""
    pools = [pool]

    def keep(call: Callable[[], Any], part: str) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph, result = capture_call(call, part, pools[-1])
        pools.append(graph.pool())
        return graph, result

    steps, results = lower_conditionals(loaded, module, leaves, where, keep)
    assert pools[-1] is not None  # a branch or a loop has a part that computes its condition
    return steps, results, pools[-1]


def lower_conditionals(
    loaded: LoadedProgram,
    module: GraphModule,
    leaves: Sequence[Any],
    where: str,
    keep: Keep = lambda call, part: (None, call()),
) -> tuple[Steps, list[Any]]:
    """Lowers and runs the straight parts of a module with branches or loops, each for its sizes.  `keep`: as in `capture_blocks`
    (default: run the call without a capture).  Raises lowering-failed."""
    level, weights = loaded.request.level, loaded.weights

    def warm(call: Callable[[], Any], part: str, restore: Callable[[], None]) -> None:
        run_warm(call, f"{part}, {level}", level, restore)

    def constant(tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - weights.data_ptr() < weights.numel()

    return capture_blocks(module, leaves, lambda part: lower(part, level, "size"), warm, keep, constant, where)


def _first_line(error: BaseException) -> str:
    """Returns the first lines of the error and of its causes, at most three."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 3:
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        texts.append(f"{type(cause).__name__}: {lines[0] if lines else ''}")
        cause = cause.__cause__
    return "; caused by ".join(texts)
