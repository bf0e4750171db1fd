"""Child process: `serve_torch.py HOW MODEL WEIGHTS OUTPUT INPUT...` does with torch what `serve_bundle.py` does with a bundle.

HOW is `eager` (builds the module and loads its weights), `uninitialized` (the same, without first computing weights that the file
replaces), or `compile` (torch.compile, also uninitialized). `uninitialized` starts faster than `eager`, but few programs do it.
WEIGHTS is a safetensors file, or `model` if `model()` loads its own weights.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

from tests.bench.common import serving


def example(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("example", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def filled(module: Any, weights: str) -> Any:
    """Returns the module with its weights."""
    network = module.model()
    if weights != "model":
        from safetensors.torch import load_file

        tensors = load_file(weights)
        network.load_state_dict({name: tensors[name] for name in network.state_dict()}, assign=True)
    return network


def skip_initialization() -> None:
    """Makes torch.nn.init do nothing: new modules keep uninitialized parameters. (The meta device would work too, but the first
    module on it takes a second of imports.)"""
    from torch.nn import init

    for name in ("normal_", "uniform_", "kaiming_uniform_", "ones_", "zeros_"):
        setattr(init, name, lambda tensor, *_args, **_options: tensor)


def main(how: str, model: str, weights: str, output: str, *inputs: str) -> None:
    """Prints {seconds, laps, cache hits} as JSON."""
    laps = serving.Laps()
    laps.mark("interpreter")
    import torch

    laps.mark("import torch")
    if how != "eager" and weights != "model":
        skip_initialization()
    network = filled(example(model), weights)
    laps.mark("module and weights")
    values = [torch.from_numpy(value) for value in serving.numpy_inputs(list(inputs))]
    laps.mark("inputs")
    if how == "compile":
        network = torch.compile(network)
    with torch.no_grad():
        result = network(*values).numpy()
    laps.mark("first call")
    serving.write(output, result)

    numbers: dict[str, Any] = {"seconds": laps.total, "laps": laps.seconds}
    if how == "compile":
        from torch._dynamo.utils import counters

        numbers["hits"] = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    print(json.dumps(numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
