"""The fresh process that verifies an engine's graphs: what it compares, and what it says."""

from __future__ import annotations

import hashlib
import json
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


def digest(values: array[float]) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


def plan(folder: Path, **changes: Any) -> Plan:
    """That of the bundle in `engine_bundle` over whole numbers: graph "small" leaves `result`, the other writes to `out`."""
    given, before = inputs(8, 3), array("f", [1.0] * ROWS)
    contents = folder / "contents"
    contents.write_bytes(given.tobytes() + before.tobytes() + bytes(4 * 4 * FLOATS))
    result = digest(expected(given[: 4 * FLOATS]))
    graphs = [
        {"spans": {}, "tensors": {"result": result}},
        {"spans": {"1": digest(expected(given))}, "tensors": {}},
    ]
    return Plan(device=0, contents=str(contents), graphs=graphs, poisoned=True)._replace(**changes)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(engine_bundle.write(tmp_path / "engine.cgb"))


@pytest.mark.parametrize("poisoned", [True, False])
def test_the_same_bits_are_no_difference(fake: FakeDriver, path: str, tmp_path: Path, poisoned: bool) -> None:
    assert engine_replay.replay(path, plan(tmp_path, poisoned=poisoned)) == ""


def other(place: int, **changes: Any) -> Callable[[Plan], Plan]:
    return lambda old: old._replace(graphs=[row | changes if at == place else row for at, row in enumerate(old.graphs)])


DIFFERENT = [
    (other(1, spans={"1": "ab" * 32}), "graph (8, 'rows'): tensor 'out' holds other bits than in the engine's process"),
    (other(0, tensors={"result": "ab" * 32}), "graph 'small': tensor 'result' holds other bits than in the engine's process"),
    (other(1, spans={}), "tensor 'out' was changed, and was not in the engine's process"),
    (other(0, spans={"0": "ab" * 32}), "graph 'small': tensor 'small' holds other bits than in the engine's process"),
]


@pytest.mark.parametrize(("change", "differs"), DIFFERENT)
def test_what_differs_is_told_by_its_tensor(
    fake: FakeDriver, path: str, tmp_path: Path, change: Callable[[Plan], Plan], differs: str
) -> None:
    assert engine_replay.replay(path, change(plan(tmp_path))) == differs


def test_tensors_lie_at_no_better_alignment_than_they_must(
    fake: FakeDriver, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    bases: list[int] = []
    allocate, attach = engine_replay.allocate, engine_replay.attach_poisoned

    def noted(size: int, what: str) -> int:
        bases.append(allocate(size, what))
        return bases[-1]

    def attached(path: str, tensors: dict[str, Any], **options: Any) -> Any:
        seen.update({name: tensor.address for name, tensor in tensors.items()}, **options)
        return attach(path, tensors, **options)

    monkeypatch.setattr(engine_replay, "allocate", noted)
    monkeypatch.setattr(engine_replay, "attach_poisoned", attached)
    engine_replay.replay(path, plan(tmp_path))
    assert seen["x"] - bases[0] == 16 and seen["out"] - bases[1] == 4 and seen["poison"] == POISON


def test_the_program_prints_one_line(fake: FakeDriver, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    for made, status, key in ((plan(tmp_path), 0, "differs"), (other(1, spans={})(plan(tmp_path)), 1, "differs")):
        file.write_text(json.dumps(made._asdict()))
        assert engine_replay.main([path, str(file)]) == status
        answer = json.loads(capsys.readouterr().out)
        assert bool(answer[key]) == bool(status)
    fake.version = 13010
    assert engine_replay.main([path, str(file)]) == 2
    assert json.loads(capsys.readouterr().out)["code"] == "driver-differs"
