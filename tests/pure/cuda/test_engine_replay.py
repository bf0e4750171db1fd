"""The new process that verifies an engine's graphs: what it compares, and what it reports."""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cgbundle.gpu import engine_replay
from cgbundle.gpu.engine_replay import POISON, Plan
from tests.helpers.bundles import engine_bundle
from tests.helpers.bundles.cuda_bundles import FLOATS, expected, inputs
from tests.helpers.drivers.fake_driver import FakeDriver

ROWS = 8 * FLOATS

ENGINES: list[Any] = []
"""Memory of the waiting process, which lives as long as these tests."""


def digest(values: array[float]) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


def plan(folder: Path, *, poisoned: bool = True) -> Plan:
    """Returns the plan of the bundle in `engine_bundle`: graph "small" leaves `result`, the other one writes to `out`."""
    values, before = inputs(8, 3), array("f", [1.0] * ROWS)
    spans = []
    for data in (values.tobytes(), before.tobytes()):
        ENGINES.append(ctypes.create_string_buffer(bytes(64) + data))
        handle = struct.pack("<QQ48x", ctypes.addressof(ENGINES[-1]), len(ENGINES[-1]))
        spans.append((handle.hex(), 64, 0x1234))
    file = folder / "contents"
    file.write_bytes(bytes(8 + 4 * 4 * FLOATS))
    contents = [] if poisoned else [(("result", 0, 4 * 4 * FLOATS), 8)]
    result, out = digest(expected(values[: 4 * FLOATS])), digest(expected(values))
    graphs = [([], [(("result", 0, 4 * 4 * FLOATS), result)]), ([], [(("out", 0, 4 * ROWS), out)])]
    return Plan(device=0, spans=spans, file=str(file), contents=contents, graphs=graphs)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(engine_bundle.write(tmp_path / "engine.cgb"))


@pytest.mark.parametrize("poisoned", [True, False])
def test_the_same_bits_are_no_difference(fake: FakeDriver, path: str, tmp_path: Path, poisoned: bool) -> None:
    assert engine_replay.replay(path, plan(tmp_path, poisoned=poisoned))[0] == ""


def other(place: int, tensor: str, at: int = 0) -> Callable[[Plan], Plan]:
    """Returns an edit of the plan: a tensor holds other bits after a graph."""
    wrong = [((tensor, at, 16), "ab" * 32)]
    return lambda plan: plan._replace(graphs=[(row[0], wrong) if at == place else row for at, row in enumerate(plan.graphs)])


DIFFERENT = [
    (other(1, "out"), "graph (8, 'rows'): tensor 'out' holds other bits than in the engine's process"),
    (other(0, "result"), "graph 'small': tensor 'result' holds other bits than in the engine's process"),
    (other(0, "small", 64), "graph 'small': tensor 'small' holds other bits than in the engine's process"),
]


@pytest.mark.parametrize(("change", "differs"), DIFFERENT)
def test_what_differs_is_named_by_its_tensor(
    fake: FakeDriver, path: str, tmp_path: Path, change: Callable[[Plan], Plan], differs: str
) -> None:
    changed = change(plan(tmp_path))
    text, at = engine_replay.replay(path, changed)
    assert text == differs and at == (int("rows" in differs), 0)
    assert len(Path(f"{changed.file}.differs").read_bytes()) == 16


def test_inputs_are_written_before_a_graph(fake: FakeDriver, path: str, tmp_path: Path) -> None:
    other_inputs, old = inputs(8, 5), plan(tmp_path)
    Path(old.file).write_bytes(other_inputs.tobytes())
    out = (("out", 0, 4 * ROWS), digest(expected(other_inputs)))
    assert "tensor 'out' holds other bits" in engine_replay.replay(path, old._replace(graphs=[old.graphs[0], ([], [out])]))[0]
    before = [(("x", 0, 4 * ROWS), 0)]
    assert engine_replay.replay(path, old._replace(graphs=[old.graphs[0], (before, [out])]))[0] == ""


def test_memory_at_the_address_of_the_engine_is_refused(fake: FakeDriver, path: str, tmp_path: Path) -> None:
    there = plan(tmp_path)
    handle, offset, _ = there.spans[1]
    address = int.from_bytes(bytes.fromhex(handle)[:8], "little") + offset
    plan_there = there._replace(spans=[there.spans[0], (handle, offset, address)])
    assert "relocation cannot be tested" in engine_replay.replay(path, plan_there)[0]


def test_what_the_graphs_own_memory_held_is_put_there(
    fake: FakeDriver, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    attach = engine_replay.attach_poisoned

    def attached(path: str, tensors: dict[str, Any], **options: Any) -> Any:
        graphs = attach(path, tensors, **options)
        result = graphs.tensors["result"]
        first = graphs["small"]
        monkeypatch.setattr(type(first), "replay", lambda self: seen.append(ctypes.string_at(result.address, 4)))
        return graphs

    monkeypatch.setattr(engine_replay, "attach_poisoned", attached)
    for poisoned in (True, False):
        engine_replay.replay(path, plan(tmp_path, poisoned=poisoned))
    assert [seen[0], seen[1]] == [bytes([POISON] * 4), bytes(4)]


def test_the_program_prints_one_line(fake: FakeDriver, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    for change, status, key in ((lambda plan: plan, 0, "differs"), (other(1, "out"), 1, "differs")):
        file.write_text(json.dumps(change(plan(tmp_path))._asdict()))
        assert engine_replay.main([path, str(file)]) == status
        answer = json.loads(capsys.readouterr().out)
        assert bool(answer[key]) == bool(status)
    fake.version = 13010
    assert engine_replay.main([path, str(file)]) == 2
    assert json.loads(capsys.readouterr().out)["code"] == "driver-differs"
