"""Calls of one model from one torch process: bundle, torch.compile, graphs captured by hand, a bare graph launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver

import cgbundle
from cgbundle.format import archive, file_names
from cgbundle.format.safetensors_files import Mapped
from cgbundle.gpu.backend import CudaBackend
from tests.bench.gpu_cold import serve_torch

Call = Callable[[], Any]


class Graph(NamedTuple):
    """A graph captured by hand: input buffer, output, and the driver's handle of the executable graph."""

    graph: torch.cuda.CUDAGraph
    static: torch.Tensor
    output: torch.Tensor
    handle: Any


def self_test_calls(bundle: str) -> dict[tuple[int, ...], torch.Tensor]:
    """Returns the first self-test input of every key, on the GPU."""
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
    """Returns the torch model with the bundle's weights, on the GPU."""
    return serve_torch.loaded(model, str(Path(bundle, file_names.WEIGHTS)))


def capture(function: Callable[..., Any], value: torch.Tensor, warm: int = 3) -> Graph:
    """Captures a CUDA graph of `function(value)`, as PyTorch's documentation describes."""
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
    """Returns a function that only calls cuGraphLaunch, on torch's current stream."""
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    call, handle = driver.cuGraphLaunch, graph.handle
    return lambda: call(handle, stream)


def replay(graph: Graph, value: torch.Tensor) -> Call:
    """Returns a function that copies the input, replays the graph and returns the static output, as users write it who copy each
    input."""

    def call() -> torch.Tensor:
        graph.static.copy_(value)
        graph.graph.replay()
        return graph.output

    return call


def bare(bundle: str) -> CudaBackend:
    """Returns the bundle's backend, which checks no inputs; see `bare_launch`."""
    return CudaBackend(archive.Archive(bundle))


def bare_launch(backend: CudaBackend, number: int, value: torch.Tensor, stream: int) -> Call:
    """Returns a replay of a program with one input at an unchanged address: it only launches the recording."""
    addresses = [value.data_ptr()]

    def call() -> Any:
        with backend.locked(stream) as handle:
            return backend.run(number, addresses, backend.device, handle)

    return call


def loaded(bundle: str, **options: Any) -> Any:
    return cgbundle.load(bundle, **options)


def compiled(network: Any, reduce_overhead: bool) -> Callable[..., Any]:
    """Returns torch.compile of the network as users call it, specialized for every size."""
    mode = "reduce-overhead" if reduce_overhead else None
    fast: Callable[..., Any] = torch.compile(network, mode=mode, fullgraph=True, dynamic=False)
    return fast


def relative(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest expected element."""
    want = expected.double()
    return float((got.double() - want).abs().max() / want.abs().max())
