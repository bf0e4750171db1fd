"""Child process: the GPT of examples/gpt.py in JAX, with the weights of a bundle, as executables compiled ahead of time.

serve_jax.py build FOLDER WEIGHTS INPUT...     compiles and serializes an executable per input
serve_jax.py serve FOLDER WEIGHTS INPUT...     loads all of them, then serves the first input
"""

from __future__ import annotations

import json
import pickle
import struct
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.common import serving

HEADS = 12
"""The same as in examples/gpt.py, which cannot be imported without torch."""


def weights_of(path: str) -> dict[str, Any]:
    """Returns the tensors of a safetensors file as NumPy arrays over the mapped file."""
    import ml_dtypes
    import numpy

    kinds = {"BF16": ml_dtypes.bfloat16, "F32": numpy.float32, "F16": numpy.float16, "I64": numpy.int64, "U8": numpy.uint8}
    data = numpy.memmap(path, numpy.uint8, "r")
    (length,) = struct.unpack("<Q", bytes(data[:8]))
    header = json.loads(bytes(data[8 : 8 + length]))
    weights = {}
    for name, row in header.items():
        if name != "__metadata__" and not name.startswith("cgcompile."):
            begin, end = (8 + length + offset for offset in row["data_offsets"])
            weights[name] = data[begin:end].view(kinds[row["dtype"]]).reshape(row["shape"])
    return weights


def forward(weights: dict[str, Any], ids: Any) -> Any:
    """Returns the logits of the last token."""
    import jax

    x = weights["token.weight"][ids] + weights["position.weight"][: ids.shape[1]]
    batch, tokens, width = x.shape
    for block in range(len([name for name in weights if name.endswith(".qkv.weight")])):
        layer = {
            name.removeprefix(f"blocks.{block}."): value for name, value in weights.items() if name.startswith(f"blocks.{block}.")
        }
        heads = linear(layer, "qkv", norm(layer, "attention_norm", x)).reshape(batch, tokens, 3, HEADS, width // HEADS)
        mixed = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
        x = x + linear(layer, "out", mixed.reshape(batch, tokens, width))
        x = x + linear(layer, "down", jax.nn.gelu(linear(layer, "up", norm(layer, "mlp_norm", x)), approximate=False))
    return norm(weights, "norm", x[:, -1]) @ weights["head.weight"].T


def linear(weights: dict[str, Any], name: str, x: Any) -> Any:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def norm(weights: dict[str, Any], name: str, x: Any) -> Any:
    import jax

    wide = x.astype("float32")
    wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    return (wide * weights[f"{name}.weight"] + weights[f"{name}.bias"]).astype(x.dtype)


def build(folder: Path, weights: str, texts: list[str]) -> dict[str, Any]:
    """Compiles an executable for every input's shape."""
    import jax
    import numpy

    start = time.perf_counter()
    shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in weights_of(weights).items()}
    folder.mkdir(parents=True, exist_ok=True)
    for index, (_, _, shape) in enumerate(serving.parse_inputs(texts)):
        executable = jax.jit(forward).lower(shapes, jax.ShapeDtypeStruct(shape, numpy.int32)).compile()
        from jax.experimental import serialize_executable

        (folder / f"{index}.jax").write_bytes(pickle.dumps(serialize_executable.serialize(executable)))
    return {"seconds": time.perf_counter() - start, "version": jax.__version__}


def serve(folder: Path, weights: str, texts: list[str]) -> dict[str, Any]:
    """Loads every executable, copies the weights to the GPU, and runs the first input, then the others."""
    laps = serving.Laps()
    laps.mark("interpreter")
    import jax
    import numpy
    from jax.experimental import serialize_executable

    laps.mark("import jax")
    jax.devices()
    laps.mark("context")
    executables = [
        serialize_executable.deserialize_and_load(*pickle.loads((folder / f"{index}.jax").read_bytes()))
        for index in range(len(texts))
    ]
    laps.mark("executables")
    placed = jax.device_put(weights_of(weights))
    inputs = [value.astype(numpy.int32) for value in serving.numpy_inputs(texts)]
    laps.mark("weights and inputs")
    output = numpy.asarray(executables[0](placed, jax.device_put(inputs[0])))
    laps.mark("first output")
    numbers = {"seconds": laps.total, "laps": dict(laps.seconds)}
    for index, (executable, value) in enumerate(zip(executables, inputs, strict=True)):
        output = numpy.asarray(executable(placed, jax.device_put(value)))
        serving.write(str(folder / f"output.{index}"), output)
    return numbers | {"platform": jax.devices()[0].platform}


def main(action: str, folder: str, weights: str, *texts: str) -> None:
    print(json.dumps({"build": build, "serve": serve}[action](Path(folder), weights, list(texts))))


if __name__ == "__main__":
    main(*sys.argv[1:])
