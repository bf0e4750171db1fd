"""Child process: `serve_torch.py HOW MODEL WEIGHTS OUTPUT INPUT...` prepares a torch model until every size replays as a CUDA
graph, then serves the first input once.

HOW is `capture` (eager kernels, one CUDA graph per size captured by hand) or `compile` (torch.compile with mode="reduce-overhead").
Modules are created uninitialized in the weights' dtype, because the weights replace them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests.bench.common import serving
from tests.bench.cpu import serve_torch

CALLS = 3
"""Number of calls until a size replays under reduce-overhead: the first one runs, the second records, the third replays."""


def captured(network: Any, inputs: Sequence[Any]) -> Callable[[Any], Any]:
    """Captures graphs of all input shapes in one pool, largest first, with one run before each capture."""
    import torch

    graphs: dict[Any, tuple[Any, Any, Any]] = {}
    pool = None
    for value in sorted(inputs, key=lambda tensor: -tensor.shape[0]):
        static = value.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            network(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = network(static)
        pool = pool or graph.pool()
        graphs[value.shape] = (graph, static, output)

    def call(value: Any) -> Any:
        graph, static, output = graphs[value.shape]
        static.copy_(value)
        graph.replay()
        return output

    return call


def compiled(network: Any, inputs: Sequence[Any]) -> Callable[[Any], Any]:
    """Returns torch.compile of the network, after enough calls that every size replays."""
    import torch

    fast = torch.compile(network, mode="reduce-overhead", fullgraph=True, dynamic=False)
    for value in inputs:
        for _ in range(CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            fast(value)
    return fast


def main(how: str, model: str, weights: str, output: str, *texts: str) -> None:
    """Prints {seconds, laps, hits} as JSON; writes the output of every input to `output`.N."""
    laps = serving.Laps()
    laps.mark("interpreter")
    import torch

    laps.mark("import torch")
    network = loaded(model, weights)
    inputs = [torch.from_numpy(value).cuda() for value in serving.numpy_inputs(list(texts))]
    laps.mark("module, weights, context")
    with torch.no_grad():
        call = captured(network, inputs) if how == "capture" else compiled(network, inputs)
        torch.cuda.synchronize()
        laps.mark("until every size replays")
        host = call(inputs[0]).cpu()
        laps.mark("first output")
        numbers: dict[str, Any] = {"seconds": laps.total, "laps": laps.seconds}
        for index, value in enumerate(inputs):
            host = call(value).cpu()
            serving.write(f"{output}.{index}", host.contiguous().view(torch.uint8).numpy())
    if how == "compile":
        from torch._dynamo.utils import counters

        numbers["hits"] = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    print(json.dumps(numbers))


def loaded(model: str, weights: str) -> Any:
    """Loads the network to the GPU with the weights of a safetensors file, as fast as torch can."""
    import torch
    from safetensors.torch import load_file

    serve_torch.skip_initialization()
    tensors = load_file(weights, device="cuda")
    torch.set_default_dtype(next(tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point))
    with torch.device("cuda"):
        network = serve_torch.example(model).model()
    torch.set_default_dtype(torch.float32)
    network.load_state_dict({name: tensors[name] for name in network.state_dict()}, assign=True)
    return network.requires_grad_(False).eval()


if __name__ == "__main__":
    main(*sys.argv[1:])
