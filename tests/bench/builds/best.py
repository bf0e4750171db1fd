"""Compares `--autotune` with torch.compile max-autotune, and with bundles of single lowerings.

    best.py [MODEL...] [--sizes N,N] [--each] [--timeout SECONDS]

Prints a line for every model and int_key: the chosen lowering, the microseconds of its graphs on the GPU, those of a graph captured
by hand from torch.compile(mode="max-autotune-no-cudagraphs"), and the ratio. Bundle and torch.compile have their own processes, and
are timed alternately, with events around many launches. torch.compile compiles before the bundle is built, so that the two do not
disturb each other. The first lines of a model show what the build measured for each lowering. `--each` also builds a bundle of
every single lowering and times it alternately with the best one: exit status 1 if a single lowering is faster by more than 5 %.

Models: gpt (12 layers, bf16), minilm (6 layers, fp32), resnet (ResNet-50, fp16, channels last), vit (ViT-B/16, bf16), decoder
(Llama of 1.2 billion parameters, bf16), mlp.  Weights are random; gpt, resnet and mlp use a fixed seed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import cgbundle
import cgcompile
from cgbundle.format.schema import Manifest
from cgbundle.gpu.backend import CudaBackend
from cgcompile.pipeline.best.timing import time_graphs
from tests.bench.common import children

ROUNDS, LAUNCHES, WARMUPS = 15, 40, 5
TOLERANCE = 1.05
Made = tuple[torch.nn.Module, Callable[..., tuple[torch.Tensor, ...]]]


def example(name: str, **environment: str) -> Made:
    """Imports a model file of examples/ and returns its model and inputs."""
    os.environ.update(environment)
    spec = importlib.util.spec_from_file_location(f"example_{name}", children.ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.model(), module.inputs


def minilm() -> Made:
    """Returns the encoder of all-MiniLM-L6-v2 with its pooling, for 128 tokens."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )  # fmt: skip

    class Embedding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = BertModel(config, add_pooling_layer=False)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            kept = mask.unsqueeze(-1).to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1).clamp(min=1e-9), dim=-1)

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return torch.randint(1000, 30000, (batch, 128)), torch.ones(batch, 128, dtype=torch.int64)

    return Embedding(), inputs


def vit() -> Made:
    """Returns ViT-B/16 for images of 224 x 224."""
    from transformers import ViTConfig, ViTModel

    from tests.bench.builds.architectures import First

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 3, 224, 224, dtype=torch.bfloat16),)

    return First(ViTModel(ViTConfig(), add_pooling_layer=False)).bfloat16(), inputs


def decoder() -> Made:
    """Returns a Llama with 16 layers, width 2048, for 64 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.bench.builds.architectures import First

    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randint(0, 32000, (batch, 64)),)

    return First(LlamaForCausalLM(config), use_cache=False).bfloat16(), inputs


MODELS: Mapping[str, tuple[Callable[[], Made], list[int]]] = {
    "gpt": (lambda: example("gpt", GPT_DTYPE="bfloat16"), [1, 8, 32]),
    "minilm": (minilm, [1, 8, 32]),
    "resnet": (lambda: example("resnet", RESNET_DTYPE="float16", RESNET_LAYOUT="channels_last"), [1, 8, 32]),
    "vit": (vit, [1, 8, 32]),
    "decoder": (decoder, [1, 8]),
    "mlp": (lambda: example("mlp"), [1, 8]),
}


def captured(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> torch.cuda.CUDAGraph:
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                function(*inputs)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function(*inputs)
    return graph


def microseconds(stream: Any, launch: Callable[[], object]) -> float:
    """Returns microseconds per launch, from two events around many launches on a stream."""
    begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(WARMUPS):
        launch()
    begin.record(stream)
    for _ in range(LAUNCHES):
        launch()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / LAUNCHES


class Baseline:
    """torch.compile of a model at its sizes, in another process. The process starts when this object is created."""

    def __init__(self, name: str, sizes: list[int]) -> None:
        line = [sys.executable, __file__, "--baseline", name, "--sizes", ",".join(map(str, sizes))]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def compiled(self) -> str:
        """Waits until the next size is compiled. Returns the seconds that it took, or the error."""
        return self._answer()

    def time(self, number: int) -> float:
        """Returns the microseconds of a launch at size `number`."""
        assert self._process.stdin is not None
        print(number, file=self._process.stdin, flush=True)
        return float(self._answer())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("torch.compile's process ended")
        return str(json.loads(line))


def serve_baseline(name: str, sizes: list[int]) -> None:
    """Runs the process of `Baseline`: writes one answer per line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers also print to stdout
    network, inputs = make_model(name)
    network = network.cuda()
    torch._dynamo.config.cache_size_limit = 64
    options = {**torch._inductor.list_mode_options("max-autotune-no-cudagraphs"), "triton.cudagraphs": False}
    graphs = []
    for size in sizes:
        begun = time.perf_counter()
        tensors = tuple([tensor.cuda() for tensor in inputs(size)])
        graphs.append(captured(torch.compile(network, options=options, fullgraph=True, dynamic=False), tensors))
        print(json.dumps(f"{time.perf_counter() - begun:.0f}"), file=answers, flush=True)
    stream = torch.cuda.Stream()
    for line in sys.stdin:
        with torch.cuda.stream(stream):
            print(json.dumps(f"{microseconds(stream, graphs[int(line)].replay)}"), file=answers, flush=True)


def beside(program: Any, number: int, baseline: Baseline, inputs: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Returns the median times of the bundle's graphs and of torch.compile's graph, timed alternately."""
    stream = torch.cuda.Stream()
    backend = program._backend
    assert isinstance(backend, CudaBackend)
    with torch.cuda.stream(stream):
        program(*inputs)
    stream.synchronize()
    times: tuple[list[float], list[float]] = [], []
    for _ in range(ROUNDS):
        with backend.locked(stream.cuda_stream) as handle:
            steps = backend.steps(number)
            times[0].append(microseconds(stream, lambda steps=steps, handle=handle: [step(handle) for step in steps]))  # type: ignore[misc]
        times[1].append(baseline.time(number))
    return statistics.median(times[0]), statistics.median(times[1])


def make_model(name: str) -> Made:
    """Returns a model in eval mode, the same in every process."""
    torch.manual_seed(0)
    network, inputs = MODELS[name][0]()
    return network.eval(), inputs


def measure(name: str, sizes: list[int], compare_levels: bool, timeout: float | None, folder: Path) -> bool:
    """Measures a model and prints its lines. Returns False if a single lowering is faster than the chosen one."""
    baseline = Baseline(name, sizes)
    try:
        for size in sizes:
            print(f"{name}: torch.compile at {size} took {baseline.compiled()} s", flush=True)
        network, inputs = make_model(name)
        begun = time.perf_counter()
        built = cgcompile.build(
            network,
            inputs,
            sizes=sizes,
            out=folder / f"{name}.cgb",
            autotune=True,
            autotune_timeout=timeout,
            force=True,
            progress=watch,
        )
        spent = ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in built.seconds if seconds >= 1)
        print(f"{name}: built in {time.perf_counter() - begun:.0f} s ({spent})", flush=True)
        programs = built.manifest.entries[0].programs
        for program in programs:
            print(f"  {program.key}: {describe_lowerings(program.lowerings)}", flush=True)
        network = network.cuda()
        with cgbundle.load(built.path) as loaded:
            for number, program in enumerate(programs):
                tensors = tuple([tensor.cuda() for tensor in inputs(*program.key)])
                with torch.no_grad():
                    want, got = network(*tensors).double(), loaded(*tensors).double()
                error = float((got - want).abs().max() / want.abs().max())
                bundle_us, torch_us = beside(loaded, number, baseline, tensors)
                best = next(row.name for row in program.lowerings if row.chosen)
                print(
                    f"  {program.key}: {best} {bundle_us:.1f} us, torch.compile max-autotune {torch_us:.1f} us,"
                    f" ratio {torch_us / bundle_us:.2f} (error {error:.1e})",
                    flush=True,
                )
    finally:
        baseline.end()
    return not compare_levels or compare(network.cpu(), inputs, sizes, built, folder)


def watch(event: cgcompile.Event) -> None:
    if event.state == "done" or event.text.endswith(("recording", "recordings", "processes")):
        print(f"    {event.stage} {event.seconds:.0f} s: {event.text}", flush=True)


def describe_lowerings(lowerings: Any) -> str:
    """Returns a text with what the build measured for each lowering."""
    rows = [f"{row.name} {sum(row.microseconds):.1f}{'*' if row.chosen else ''}" for row in lowerings if not row.reason]
    return ", ".join([*rows, *[f"no {row.name}: {row.reason[:120]}" for row in lowerings if row.reason]])


def compare(network: torch.nn.Module, inputs: Any, sizes: list[int], built: cgcompile.Built, folder: Path) -> bool:
    """Compares bundles of single lowerings with the best one."""
    paths, manifests = {"best": built.path}, {"best": built.manifest}
    for level in ("eager", "inductor", "max-autotune", "cross-compile"):
        options: dict[str, Any] = {"record": "cross-compile", "prove": "none"} if level == "cross-compile" else {"lower": level}
        try:
            candidate = cgcompile.build(network, inputs, sizes=sizes, out=folder / f"{level}.cgb", force=True, **options)
        except cgbundle.CgbundleError as refusal:
            print(f"  no {level}: {refusal}")
            continue
        paths[level], manifests[level] = candidate.path, candidate.manifest
    timed = time_graphs(
        paths, {name: needs(manifest) for name, manifest in manifests.items()}, torch.cuda.mem_get_info()[0], folder
    )
    fine = True
    for program in built.manifest.entries[0].programs:
        times = {name: sum(graph_times["forward", program.key]) for name, graph_times in timed.times.items()}
        slow = [name for name, duration in times.items() if times["best"] > TOLERANCE * duration]
        fine = fine and not slow
        words = ", ".join(f"{name} {duration:.1f}" for name, duration in times.items())
        print(f"  {program.key}: {words}{' SLOWER THAN ' + ', '.join(slow) if slow else ''}", flush=True)
    return fine


def needs(manifest: Manifest) -> int:
    """Returns the total bytes of the bundle's memories."""
    return sum(size for _, size in manifest.memories)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], default=[])
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--baseline", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.baseline:
        serve_baseline(options.baseline, options.sizes)
        return 0
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models or list(MODELS):
            fine = measure(name, options.sizes or MODELS[name][1], options.each, options.timeout, Path(folder)) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
