"""Records a case of models.py, and writes the data for replays in a process without torch."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map_only

from cgcompile.capture import recorder
from cgcompile.capture.assemble import Assembled, assemble
from cgcompile.capture.recorder import Recorded
from cgcompile.capture.take import Take
from cgcompile.export.functionalization import functional, state_buffers
from cgcompile.export.programs import Programs, coarsest
from cgcompile.targets.weights import contents
from cgcompile.transforms.error_bounds import TF32
from tests.gpu.helpers.models import CASES
from tests.helpers.census import count

HERE = Path(__file__).parent

RECORDED = ("mlp_small", "gpt_two", "lstm", "fft", "conv", "counting", "sorting")
"""Cases that are recorded with every lowering."""


def export(name: str, device: str = "cpu") -> tuple[Programs, dict]:
    """Exports a case with a dynamic batch. Returns the program and one call per size."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model().eval().to(device)
    calls = {(size,): (tuple(t.to(device) for t in case.inputs(size)), {}) for size in case.sizes}
    args = calls[max(calls)][0] if len(calls) > 1 else tuple(t.to(device) for t in case.inputs(3))
    shapes = tuple({0: torch.export.Dim("batch", min=1, max=4096)} for _ in args)
    program = torch.export.export(model, args, dynamic_shapes=shapes)
    return Programs(by_key=dict.fromkeys(calls, program), dynamic=True), calls


def record_case(name: str, folder: Path, level: str, **options) -> tuple[Recorded, dict]:
    """Records a case. Returns the recording and the plain data of `replay.py`."""
    programs, calls = export(name)
    takes: list[Take] = []

    def noted(a: Take, b: Take, *rest: Any) -> Assembled:
        takes[:] = a, b
        return assemble(a, b, *rest)

    self_test = options.pop("self_test", None) or other_calls(calls)
    with mock.patch.object(recorder, "assemble", noted):
        recorded = recorder.record(
            programs,
            calls,
            self_test=self_test,
            folder=folder,
            level=level,
            state=state_buffers(functional(programs.first)),
            **options,
        )
    tensors = programs.weights()
    plain = {
        "recordings": {key: graph.recording for key, (graph,) in recorded.graphs.items()},
        "inputs": {key: graph.inputs for key, (graph,) in recorded.graphs.items()},
        "outputs": {key: graph.outputs for key, (graph,) in recorded.graphs.items()},
        "trials": {key: (replay.contents.inputs, replay.contents.outputs) for key, replay in recorded.replays.items()},
        "arena": max(graph.arena for (graph,) in recorded.graphs.values()),
        "static": max(recorded.static.values()),
        "weights": recorded.weights,
        "weight_contents": {w.tensor: contents(tensors[w.tensor], w.strides) for w in recorded.weights},
        "tables": [(table.offset, table.contents) for table in recorded.tables],
        "weights_bytes": recorded.weights_bytes,
        "states": recorded.states,
        "images": recorded.images,
        "state_bytes": recorded.state_bytes,
    }
    (folder / "plain.pkl").write_bytes(pickle.dumps(plain))
    plain["census"] = {graph.key: census for graph, census in zip(takes[0].graphs, count(*takes), strict=True)}
    return recorded, plain


def check_recording(name: str, folder: Path, level: str) -> Recorded:
    """Records a case. Checks that it is deterministic and close to eager PyTorch, and that it can be replayed at other
    addresses."""
    recorded, plain = record_case(name, folder, level)
    assert replay(folder) == "exact"
    bound = max(TF32, coarsest(export(name)[0]))
    for key, replayed in recorded.replays.items():
        assert replayed.deterministic and all(difference.error <= bound for difference in replayed.differences), (
            key,
            replayed.differences,
        )
        census = plain["census"][key]
        assert census.shifted == census.relocations, "the two recordings had the same addresses: nothing was proved"
    return recorded


def other_calls(calls: dict) -> dict:
    """Returns other inputs of the same shapes for every key, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return {key: tree_map_only(torch.Tensor, lambda t: _other_values(t, generator), call) for key, call in calls.items()}


def _other_values(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns other values of the same kind: floats with the same mean and spread, others permuted, so that indices stay valid."""
    if tensor.dtype.is_floating_point and tensor.numel() and tensor.element_size() > 1:
        wide = tensor.detach().cpu().double()
        spread = wide.std(correction=0).item() or 1.0
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * spread + wide.mean().item()
        return torch.empty_like(tensor, device="cpu").copy_(noise)
    flat = tensor.detach().cpu().reshape(-1)
    order = torch.randperm(flat.numel(), generator=generator)
    return torch.empty_like(tensor, device="cpu").copy_(flat[order].reshape(tensor.shape))


def replay(folder: Path) -> str:
    """Replays a recording in a new process without torch. Returns its report: "exact", or an error."""
    command = [sys.executable, str(HERE / "replay.py"), str(folder / "plain.pkl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}"
