"""The self-test of a recording: bytes of the recording process become tensors with the manifest's dtypes and shapes, and runs of
changed state."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from cgbundle.format.schema import Value, Weight
from cgcompile.bundle.self_test import ReplayedBytes, replayed_self_test, write_self_test
from cgcompile.bundle.single_region import whole_program
from cgcompile.util.raw_bytes import changes


def value(dtype: str, shape: tuple[int, ...]) -> Value:
    strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    return Value(dtype=dtype, shape=shape, strides=strides, memory="inputs", offset=0)


def test_a_replay_becomes_tensors_and_runs_of_state(tmp_path: Path) -> None:
    x, kept = torch.arange(6, dtype=torch.float32).reshape(2, 3), torch.tensor([True, False])
    cache = torch.zeros(2, 4, dtype=torch.bfloat16)
    after = cache.clone()
    after[1, :2] = 3
    program = whole_program("graph", (2,), [value("float32", (2, 3)), value("int64", (0,))], [value("bool", (2,))])
    changed = changes(cache.reshape(-1), after.reshape(-1))
    raw = [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in (x, kept, x + 1, *changed)]
    replay = ReplayedBytes(inputs=(raw[0], b""), outputs=(raw[1],), mutated=(raw[2],), state=(("model.cache", raw[3], raw[4]),))
    row = Weight(name="cache", tensor="cache", dtype="bfloat16", shape=(2, 4), strides=(4, 1), memory="state", offset=0)
    prepared = SimpleNamespace(weights={"model.cache": cache}, written=(0,))
    (self_test,) = replayed_self_test([program], {(2,): replay}, prepared, [row])  # type: ignore[arg-type]
    assert torch.equal(self_test.inputs[0], x) and self_test.inputs[1].shape == (0,) and torch.equal(self_test.outputs[0], kept)
    assert [(index, tensor.tolist()) for index, tensor in self_test.mutated] == [(0, (x + 1).tolist())]
    ((index, runs, elements),) = self_test.state
    assert (index, runs.tolist(), elements.tolist()) == (0, [[4, 2]], [3, 3])
    write_self_test(tmp_path / "exam.safetensors", {"forward": [self_test]})
    text = (tmp_path / "exam.safetensors").read_bytes()
    for name in ("2/input/0", "2/input/1", "2/output/0", "2/mutated/0", "2/state/0", "2/state-at/0"):
        assert name.encode() in text, name
