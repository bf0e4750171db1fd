"""Ways to call one model from one torch process: the bundle, torch.compile, graphs captured by hand, a bare launch of a graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver

import cgbundle
from cgbundle.format import archive, file_names
from cgbundle.format.safetensors import Mapped
from cgbundle.gpu.backend import CudaBackend
from tests.bench.gpu_cold import serve_torch

Call = Callable[[], Any]


class Graph(NamedTuple):
    """A graph captured by hand: its input buffer, output, and executable graph of the driver."""

    graph: torch.cuda.CUDAGraph
    static: torch.Tensor
    output: torch.Tensor
    handle: Any


def self_test_calls(bundle: str) -> dict[tuple[int, ...], torch.Tensor]:
    """The self-test's first input of every key, on the GPU."""
    entry = archive.read_manifest(bundle).entries[0]
    stored = Mapped(str(Path(bundle, file_names.SELF_TEST)), file_names.SELF_TEST)
    inputs = {}
    try:
        for program in entry.programs:
            name = file_names.self_test_entry(program.key, "input", 0)
            row = stored.entries[name]
            raw = torch.frombuffer(bytearray(stored.data(name)), dtype=getattr(torch, row.dtype))
            inputs[program.key] = raw.reshape(row.shape).cuda()
    finally:
        stored.close()
    return inputs


def network_of(model: str, bundle: str) -> Any:
    """The torch model with the bundle's weights, on the GPU."""
    return serve_torch.loaded(model, str(Path(bundle, file_names.WEIGHTS)))


def capture(function: Callable[..., Any], value: torch.Tensor, warm: int = 3) -> Graph:
    """A CUDA graph of `function(value)`, captured as PyTorch's documentation says."""
    static = value.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            function(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        output = function(static)
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    error, handle = driver.cuGraphInstantiate(driver.CUgraph(graph.raw_cuda_graph()), 0)
    if error:
        raise SystemExit(f"cuGraphInstantiate: {error}")
    return Graph(graph, static, output, handle)


def launch(graph: Graph) -> Call:
    """The driver call alone, on torch's current stream."""
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    call, handle = driver.cuGraphLaunch, graph.handle
    return lambda: call(handle, stream)


def replay(graph: Graph, value: torch.Tensor) -> Call:
    """What a careful user writes: copy the input, replay, read the static output."""

    def call() -> torch.Tensor:
        graph.static.copy_(value)
        graph.graph.replay()
        return graph.output

    return call


def bare(bundle: str) -> CudaBackend:
    """The bundle's backend, without guards: see `bare_launch`."""
    return CudaBackend(archive.Archive(bundle))


def bare_launch(backend: CudaBackend, number: int, value: torch.Tensor, stream: int) -> Call:
    """A replay of a program of one input, which is where it was at the call before: it launches the recording and nothing else."""
    addresses = [value.data_ptr()]

    def call() -> Any:
        with backend.locked(stream) as handle:
            return backend.run(number, addresses, backend.device, handle)

    return call


def loaded(bundle: str, **options: Any) -> Any:
    """`cgbundle.load`."""
    return cgbundle.load(bundle, **options)


def compiled(network: Any, reduce_overhead: bool) -> Callable[..., Any]:
    """torch.compile as users call it, specialized to every size."""
    mode = "reduce-overhead" if reduce_overhead else None
    fast: Callable[..., Any] = torch.compile(network, mode=mode, fullgraph=True, dynamic=False)
    return fast


def relative(expected: torch.Tensor, got: torch.Tensor) -> float:
    """The largest difference, of the largest expected element."""
    want = expected.double()
    return float((got.double() - want).abs().max() / want.abs().max())
