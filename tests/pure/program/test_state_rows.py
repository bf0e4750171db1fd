"""State whose number of rows a load chooses: on the fake driver, with its error texts and its invariants."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cgbundle.cpu.host_weights import Room, gpu_room, host_room, resized
from cgbundle.cpu.machine import free_memory
from cgbundle.errors import OutOfMemory
from cgbundle.format import manifest_json
from cgbundle.format.limits import STATE_ROWS
from cgbundle.format.schema import Alias, Manifest, StateDimension, World
from cgbundle.format.table import Table
from cgbundle.gpu.backend import CudaBackend
from cgbundle.program import Program
from cgbundle.tensors.tensor import Tensor, from_bytes
from cgbundle.validate.contents import check_tables
from cgbundle.validate.manifest import check_weight_rows
from cgbundle.validate.state import check_rows_of_recording, check_state, check_state_dimensions
from cgcompile.bundle import manifest_text
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import MemsetNode
from tests.helpers.bundles import rows_bundle
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.cuda_bundles import FLOATS, KEYS, STATE_AT, address, expected, inputs
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.rows_bundle import LEAST, LINES, TOTAL
from tests.helpers.drivers.fake_driver import FakeDriver
from tests.helpers.raising import raises

ROOMY = Room(1 << 40, 0.5, "the machine")


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Manifest, Path]:
    return rows_bundle.write(tmp_path / "rows.cgb"), tmp_path / "rows.cgb"


def opened(bundle: tuple[Manifest, Path], mode: str = "graph", **rows: int) -> Program:
    manifest, folder = bundle
    backend = CudaBackend(ArchiveOf(folder, manifest), 0, mode, lazy=False, rows=rows)
    return Program(backend.manifest, backend, "pad", "copy")


def batch(key: int, seed: int = 0) -> Tensor:
    return from_bytes(inputs(key, seed).tobytes(), "float32", (key, FLOATS))


def floats(tensor: Tensor, count: int) -> list[float]:
    return array("f", ctypes.string_at(tensor.address, 4 * count)).tolist()


# --- over the fake driver ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["graph", "stream"])
@pytest.mark.parametrize("rows", [LEAST, LEAST + 1, 1000])
def test_calls_find_the_state_where_it_lies(fake: FakeDriver, bundle: tuple[Manifest, Path], mode: str, rows: int) -> None:
    check_tables(ArchiveOf(bundle[1], bundle[0]))
    with opened(bundle, mode, rows=rows) as program:
        assert program.state.rows == {"rows": rows} and set(program.state) == {"marks", "lines", "total"}
        assert program.state["total"].shape == (rows, 4) and program.state["lines"].shape == (rows, 8)
        total = [0.0] * 16
        for key, seed in ((4, 0), (8, 1), (4, 2)):
            x = batch(key, seed)
            assert floats(program(x)["y"], key * FLOATS) == expected(inputs(key, seed)).tolist()
            total = [a + b for a, b in zip(total, floats(x, FLOATS), strict=True)]
        assert floats(program.state["total"], 16) == total and not any(program.state["total"].tobytes()[64:])
        assert not any(program.state["lines"].tobytes()) and program.state["marks"].tolist() == [7] * 8
        number = next(index for index, row in enumerate(program.manifest.weights) if row.name == "number")
        assert int.from_bytes(program.state_bytes(number), "little") == rows
        program.reset()
        assert not any(program.state["total"].tobytes()) and int.from_bytes(program.state_bytes(number), "little") == rows
        with program.session() as session:
            session(batch(4))
            assert session.state["total"].shape == (rows, 4) and not any(program.state["total"].tobytes())


def test_default_numbers_of_rows(fake: FakeDriver, tmp_path: Path) -> None:
    """By default state gets nine tenths of the fake GPU's free memory, or as many rows as are useful."""
    limited = rows_bundle.write(tmp_path / "most.cgb", most=50)
    with opened((limited, tmp_path / "most.cgb")) as program:
        assert program.state.rows == {"rows": 50}


def test_too_little_memory_is_one_sentence(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    with raises("out-of-memory", match=r"state rows=1000000000: needs 24,\d+,\d+,\d+ bytes, beside .* the GPU has [\d,]+ free"):
        opened(bundle, rows=10**9)


# --- numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"rows": 0}, "state 'rows': 0 rows, expected at least 4, with which it was built"),
        ({"rows": STATE_ROWS + 1}, "state 'rows': 2147483648 rows, expected at most 2,147,483,647"),
        ({"row": 9}, r"state 'row': .* no such dimension of its state \(did you mean rows\?\): it has 'rows'"),
    ],
)
def test_numbers_that_cannot_be(bundle: tuple[Manifest, Path], asked: dict[str, int], said: str) -> None:
    with raises("state-rows", match=said):
        resized(bundle[0], asked, ROOMY)


def test_memory_is_shared_out(bundle: tuple[Manifest, Path]) -> None:
    """Dimensions get equal parts of the memory. The other one also gets the unused rest of a part."""
    lines, total = bundle[0].state_dimensions[0].weights
    two = (StateDimension(name="a", weights=(lines,)), StateDimension(name="b", weights=(total,)))
    room = Room(2 * (24000 + LINES), 0.5, "the machine")

    def rows(*dimensions: StateDimension, **asked: int) -> dict[str, int]:
        manifest = resized(replace(bundle[0], state_dimensions=dimensions), asked, room)
        assert dict(manifest.memories)["state"] <= room.free
        return {dimension.name: manifest.weights[dimension.weights[0]].shape[0] for dimension in dimensions}

    plain = rows(*two)
    assert 1400 < plain["a"] <= 1500 and 700 < plain["b"] <= 750
    assert rows(replace(two[0], most=10), two[1])["a"] == 10
    assert rows(replace(two[0], most=10), two[1])["b"] > 1400
    assert rows(*two, a=2000)["a"] == 2000 and rows(*two, a=2000)["b"] < 500
    assert rows(replace(two[0], most=10), replace(two[1], most=20)) == {"a": 10, "b": 20}
    with pytest.raises(OutOfMemory, match="state a=4, b=4: needs 1,792 bytes, the machine has 1,000 free"):
        resized(replace(bundle[0], state_dimensions=two), {}, Room(1000, 0.5, "the machine"))


def test_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:      40 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("")
    assert host_room(free_memory(str(tmp_path))).free == 40 << 10
    assert gpu_room(1000, {"weights": 300, "state": 500, "arena": 100, "host": 1 << 40}).free == 600
    assert gpu_room(100, {"weights": 300}).free == 0


# --- invariants ------------------------------------------------------------------------------------------------------------


def dimension(manifest: Manifest, **changes: Any) -> Manifest:
    return replace(manifest, state_dimensions=(replace(manifest.state_dimensions[0], **changes),))


def row(name: str, **changes: Any) -> Callable[[Manifest], Manifest]:
    return lambda manifest: replace(
        manifest, weights=tuple([replace(weight, **changes) if weight.name == name else weight for weight in manifest.weights])
    )


def number(manifest: Manifest, name: str) -> int:
    return [weight.name for weight in manifest.weights].index(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda base: dimension(base, name=""), "state_dimensions: unnamed"),
        (lambda base: replace(base, state_dimensions=base.state_dimensions * 2), "state_dimensions: unnamed, or one occurs twice"),
        (lambda base: dimension(base, weights=()), r"state_dimensions\[0\]: is of weights that are no state"),
        (lambda base: dimension(base, weights=(0,)), r"state_dimensions\[0\]: is of weights that are no state"),
        (lambda base: dimension(base, weights=(99,)), r"state_dimensions\[0\]: is of weights that are no state"),
        (lambda base: dimension(base, count=99), r"state_dimensions\[0\]: is of weights that are no state"),
        (lambda base: dimension(base, weights=base.state_dimensions[0].weights[::-1]), "weights: not ascending"),
        (lambda base: dimension(base, weights=(number(base, "random"),)), "or is a count or random state"),
        (lambda base: dimension(base, count=base.state_dimensions[0].weights[0]), "weights: one belongs to two dimensions"),
        (lambda base: dimension(base, count=number(base, "random")), "count: 'random' is no number of rows"),
        (lambda base: dimension(base, most=LEAST - 1), r"state_dimensions\[0\].most: 3, and there are 4 rows at least"),
        (lambda base: dimension(base, most=STATE_ROWS + 1), r"state_dimensions\[0\].most"),
        (row("lines", shape=(5, 8)), r"weights: have \[4, 5\] rows, not all as many"),
        (row("lines", zeros=False), "weights: 'lines' is not zeros, row behind row"),
        (row("lines", strides=(1, 4)), "weights: 'lines' is not zeros, row behind row"),
        (row("number", shape=(2,)), "count: 'number' is no number of rows"),
        (row("number", offset=1920), r"weights\[\d\].offset: lies behind state that has any number of rows"),
        (lambda base: edited(base, mutated_buffers=(number(base, "number"),)), "mutated_buffers: a number of rows"),
        (
            lambda base: edited(base, aliases=(Alias(output=0, memory="state", index=number(base, "total")),)),
            "aliases: an output is a part of state that has any number of rows",
        ),
        (
            lambda base: edited(base, programs=(replace(
                base.entries[0].programs[0], values=(replace(base.entries[0].programs[0].values[0], memory="state", offset=TOTAL),)
            ),)),
            r"entries\[0\].programs\[0\].values: one lies in state that has any number of rows",
        ),
        (lambda base: replace(base, world=World(rank=0, size=2, stride=2 << 20, status=0, limit=8)), "world: must be absent"),
    ],
)  # fmt: skip
def test_what_a_manifest_may_not_say(bundle: tuple[Manifest, Path], change: Callable[[Manifest], Manifest], said: str) -> None:
    check_state(bundle[0])
    check_weight_rows(bundle[0])
    check_state_dimensions(bundle[0])
    with raises("manifest-invalid", match=said):
        check_state_dimensions(manifest_json.decode(manifest_text.encode(change(bundle[0]))))


def test_kernels_alone_touch_such_state(bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    file = folder / f"graphs/g0-{KEYS[0]}.bin"
    recording = tables.decode(file.read_bytes())

    def checked(*nodes: Any) -> None:
        check_rows_of_recording(manifest, Table(tables.encode(replace(recording, nodes=nodes, edges=()))))

    checked(*recording.nodes)
    filled = MemsetNode(target=address(STATE_AT, LINES), value=7, element=1, width=8, height=1, pitch=0)
    with raises("table-invalid", match="a memset or memcpy in state that has any number of rows"):
        checked(filled)
    kernel = next(node for node in recording.nodes if any(link.target.offset == TOTAL for link in getattr(node, "relocations", ())))
    for inside, past in ((TOTAL + 63, TOTAL + 64), (LINES + 31, LINES + 32)):
        moved = [
            replace(kernel, relocations=tuple([
                replace(word, target=address(STATE_AT, at)) if word.target.offset == TOTAL else word for word in kernel.relocations
            ]))
            for at in (inside, past)
        ]  # fmt: skip
        checked(moved[0])
        with raises("relocation-invalid", match="lies behind the fewest rows of"):
            checked(moved[1])
