"""Takes of two processes (an engine's graphs as each read them) become the bundle's graphs: relocations, and every refusal. Needs
no GPU and no torch."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from struct import pack
from types import SimpleNamespace
from typing import Any

import pytest

from cgbundle.format.schema import EngineSpan, EngineTensor
from cgbundle.validate.module_state import Address, Relocation
from cgcompile.capture.engine import engine_take, observe
from cgcompile.capture.engine.assemble import AssembledEngine, assemble_engine
from cgcompile.capture.engine.engine_take import EngineTake, NamedTensor, PointerWord, read_recording, write_recording
from cgcompile.capture.engine.layout import alignment, inputs_bytes, lay_out_tensors, without
from cgcompile.capture.engine.save import save_graphs
from cgcompile.capture.placement import SEGMENT_ALIGN
from cgcompile.capture.take import Pointee, Range, RawGraph, RawKernel, RawMemset, RawModuleState, RawNode, RawValue, Take, Word
from cgcompile.capture.worker.address_map import AddressMap
from cgcompile.targets.memory_layout import PAD
from tests.helpers.raising import raises

MEGA = 1 << 20
WEIGHTS, INPUTS, ARENA = 0, 2, 3
ONE, TWO = 0x7F00_0000_0000, 0x7E55_4000_0000


class Process:
    """An imaginary process of an engine, with tensors `cache` and `x`, two pool segments in `order`, a block that torch uses, and
    an allocation of a library."""

    def __init__(self, base: int, order: tuple[int, int] = (0, 1), contents: bytes = b"") -> None:
        self.base, self.x, self.cache = base, base + MEGA, base + 2 * MEGA
        spots = [base + 32 * MEGA, base + 64 * MEGA]
        self.segments = [spots[at] for at in order]
        self.block, self.table = base + 128 * MEGA, base + 160 * MEGA
        places = {
            "x": SimpleNamespace(address=self.x, dtype="float32", shape=(8,), strides=(1,)),
            "cache": SimpleNamespace(address=self.cache, dtype="float32", shape=(64, 4), strides=(4, 1)),
            "row": SimpleNamespace(address=self.cache + 16, dtype="float32", shape=(4,), strides=(1,)),
        }
        spans, self.tensors = lay_out_tensors(places)  # type: ignore[arg-type]
        ranges = [
            *spans,
            *(Range(kind="pool", start=spot, size=2 * MEGA) for spot in sorted(self.segments)),
            Range(kind="torch", start=self.block, size=512),
        ]
        owned = [(piece.start, piece.size) for piece in ranges]
        known = Pointee(kind="device", start=self.table, size=16)
        self.map = AddressMap(ranges, owned, lambda address: known if 0 <= address - self.table < 16 else None)
        self.contents = contents

    def kernel(self, *words: int, line: str = "") -> RawKernel:
        data = pack(f"<{len(words)}Q", *words)
        return RawKernel(
            image="ab" * 32, symbol="add", params=tuple([(8 * at, 8) for at in range(len(words))]), function_attributes=(),
            grid=(1, 1, 1), threads=(128, 1, 1), shared=0, attributes=((4, (2, 1, 1)),), block=self.map.block(data, ()), line=line,
        )  # fmt: skip

    def memset(self, address: int) -> RawMemset:
        return RawMemset(target=Word(at=0, readings=self.map.readings(address, ())), shape=(0, 4, 16, 1, 0))

    def take(
        self, *graphs: list[RawNode], states: tuple[RawModuleState, ...] = (), pooled: int = 0, pointers: tuple[Any, ...] = ()
    ) -> EngineTake:
        value = RawValue(
            dtype="float32", shape=(4,), strides=(1,), place=Word(at=0, readings=self.map.readings(pooled, ()))
        )  # fmt: skip
        raw = [
            RawGraph(
                key=(at,), nodes=tuple(nodes), edges=(), inputs=(), outputs=(value,) if pooled and not at else (),
                name=f"graph {at}",
            )
            for at, nodes in enumerate(graphs)
        ]  # fmt: skip
        ranges = self.map.fill([at for at, piece in enumerate(self.map.ranges) if piece.kind == "device"], self._read, 1 << 20)
        take = Take(
            ranges=ranges, graphs=tuple(raw), states=states, self_tests=(), images={}, mutated=(), arch="sm_90", driver=13000
        )
        return EngineTake(
            take=take, keys=tuple(range(len(graphs))), tensors=self.tensors, pooled=("logits",) if pooled else (),
            pointers=pointers, versions=(("torch", "2.11"), ("gpu", "H200")), process=str(self.base),
        )  # fmt: skip

    def _read(self, start: int, size: int) -> bytes:
        return self.contents or bytes(size)


def assembled(build: Any, orders: tuple[Any, Any] = ((0, 1), (1, 0)), **options: Any) -> AssembledEngine:
    """Returns the result of `assemble` for two processes, which `build` describes."""
    takes = [build(Process(base, order)) for base, order in zip((ONE, TWO), orders, strict=True)]
    return assemble_engine(*takes, own_memory=options.get("own_memory", False))


def test_graphs_share_one_arena_and_name_their_tensors() -> None:
    def build(p: Process) -> EngineTake:
        first = [p.kernel(p.cache + 32, p.segments[1] + 512, 77), p.memset(p.segments[0])]
        second: list[RawNode] = [p.kernel(p.segments[0] + 64, p.cache + 1024, 5)]
        return p.take(first, second, pooled=p.segments[1] + 4096)

    engine = assembled(build)
    kernel, memset = engine.recordings[0].nodes
    at = lambda offset, memory, place: Relocation(at=offset, target=Address(memory=memory, offset=place))  # noqa: E731
    assert kernel.relocations == (at(0, INPUTS, 32), at(8, ARENA, 512))  # type: ignore[union-attr]
    assert kernel.attributes == ((4, (2, 1, 1)),)  # type: ignore[union-attr]
    assert memset.target == Address(memory=ARENA, offset=SEGMENT_ALIGN)  # type: ignore[union-attr]
    again = engine.recordings[1].nodes[0].relocations  # type: ignore[union-attr]
    assert again == (at(0, ARENA, SEGMENT_ALIGN + 64), at(8, INPUTS, 1024)), "one past the end of the cache stays its own"
    assert engine.arena == 2 * SEGMENT_ALIGN + PAD
    assert [recording.key for recording in engine.recordings] == [(0,), (1,)]
    assert engine.spans == (EngineSpan(offset=0, bytes=1024, alignment=256),), "x is used by no graph"
    tensor = EngineTensor(name="cache", dtype="float32", shape=(64, 4), strides=(4, 1), memory="inputs", offset=0)
    row = EngineTensor(name="row", dtype="float32", shape=(4,), strides=(1,), memory="inputs", offset=16)
    logits = EngineTensor(name="logits", dtype="float32", shape=(4,), strides=(1,), memory="arena", offset=4096)
    assert engine.tensors == (tensor, row, logits)


def test_memory_that_no_tensor_names_is_refused_with_the_kernel_and_the_line() -> None:
    with raises(
        "memory-unnamed",
        match=r"graph 0, node 1 \(add, engine.py:7\), parameter 1, .* points at 512 bytes of torch's memory .*, 8 bytes into it",
    ):
        assembled(lambda p: p.take([p.kernel(p.x), p.kernel(p.x, p.block + 8, line="engine.py:7")]))
    with raises("memory-unnamed", match=r"graph 0, node 0 \(memset\) points at 512 bytes"):
        assembled(lambda p: p.take([p.memset(p.block)]))
    with raises("memory-unnamed", match=r"node 0 \(add\), parameter 0, .* 16 bytes of an allocation that torch did not make"):
        assembled(lambda p: p.take([p.kernel(p.table)]))


def state(p: Process, address: int) -> tuple[RawModuleState, ...]:
    return (RawModuleState(image="ab" * 32, symbol="lut", block=p.map.block(pack("<Q", address), None)),)


def test_what_a_variable_points_to_is_a_table_of_the_bundle() -> None:
    engine = assembled(lambda p: p.take([p.kernel(p.x, p.table + 8)], states=state(p, p.table)))
    assert [table.contents for table in engine.tables] == [bytes(16)] and engine.weights_end == 256
    assert engine.states[0].relocations == (Relocation(at=0, target=Address(memory=WEIGHTS, offset=0)),)
    assert engine.recordings[0].nodes[0].relocations[1].target == Address(memory=WEIGHTS, offset=8)  # type: ignore[union-attr]


def test_a_variable_that_points_at_what_others_may_write_is_refused() -> None:
    with raises("memory-unnamed", match="a variable of a kernel's image points at 512 bytes of torch's memory"):
        assembled(lambda p: p.take([p.kernel(p.x)], states=state(p, p.block)))


def pointers(p: Process, number: int, target: int) -> tuple[PointerWord, ...]:
    return (PointerWord(range=number, word=Word(at=24, readings=p.map.readings(target, None))),)


def test_addresses_in_memory_are_refused_where_both_processes_have_one() -> None:
    with raises("pointer-in-tensor", match="tensor 'cache' holds an address at byte 24, of tensor 'x': `attach` would not"):
        assembled(lambda p: p.take([p.kernel(p.cache, p.x)], pointers=pointers(p, 0, p.x + 4)))
    with raises("pointer-in-tensor", match="tensor 'cache' holds an address at byte 24: `attach` would not"):
        assembled(lambda p: p.take([p.kernel(p.cache, p.x)], pointers=pointers(p, 0, p.x if p.base == ONE else p.cache)))
    assert assembled(lambda p: p.take([p.kernel(p.x)], pointers=pointers(p, 0, p.x))).spans, "no graph uses the cache"
    stale = lambda p: p.take([p.kernel(p.cache)], pointers=pointers(p, 0, p.x) if p.base == ONE else ())  # noqa: E731
    assert assembled(stale).spans


def test_addresses_in_the_graphs_own_memory_count_where_no_replay_shows_who_writes_them() -> None:
    def build(p: Process) -> EngineTake:
        (number,) = [at for at, piece in enumerate(p.map.ranges) if piece.start == p.segments[0]]
        return p.take([p.kernel(p.segments[0], p.x)], pointers=pointers(p, number, p.x))

    assert assembled(build).spans
    with raises("pointer-in-tensor", match="the graphs' own memory holds an address at byte 24, of tensor 'x'"):
        assembled(build, own_memory=True)


def test_two_processes_with_the_same_addresses_prove_nothing() -> None:
    takes = [Process(ONE).take([Process(ONE).kernel(Process(ONE).x)]) for _ in range(2)]
    with raises("addresses-equal", match="both processes have 32 bytes of the engine's at 0x7f0000100000"):
        assemble_engine(takes[0], replace(takes[1], process="other"), own_memory=False)


def test_processes_of_other_engines_are_told_apart() -> None:
    one, two = [Process(base).take([Process(base).kernel(Process(base).x)]) for base in (ONE, TWO)]
    assert assemble_engine(one, two, own_memory=False)
    tensors = (replace(two.tensors[0], shape=(32, 4)), *two.tensors[1:])
    for other, match in (
        (replace(two, process=one.process), "both recordings are of this process"),
        (replace(two, versions=(("torch", "2.12"), two.versions[1])), r"other versions: .*'2.11'\) and .*'2.12'\)"),
        (replace(two, take=replace(two.take, driver=13010)), "other driver: 13000 and 13010"),
        (replace(two, keys=(8,)), "other keys: 0 and 8"),
        (replace(two, keys=(0, 8)), "other keys: 1 and 2 of them"),
        (replace(two, pooled=("logits",)), "other tensors in the graphs' own memory: 0 and 1 of them"),
        (replace(two, tensors=tensors), r"tensor 'cache' was .*\(64, 4\).* and is .*\(32, 4\)"),
        (replace(two, tensors=two.tensors[:2]), "has 3 tensors, this one 2"),
    ):
        with raises("engine-differs", match=match):
            assemble_engine(one, other, own_memory=False)


# --- where tensors lie -------------------------------------------------------------------------------------------------


def test_tensors_that_overlap_share_a_span() -> None:
    spans, rows = lay_out_tensors(
        {
            "b": SimpleNamespace(address=1000, dtype="float32", shape=(2, 3), strides=(10, 1)),
            "a": SimpleNamespace(address=1040, dtype="int64", shape=(2,), strides=(1,)),
            "c": SimpleNamespace(address=1056, dtype="uint8", shape=(256,), strides=(1,)),
        }
    )  # type: ignore[dict-item]
    assert [(piece.start, piece.size, piece.offset) for piece in spans] == [(1000, 56, 0), (1056, 256, 256)]
    assert [(row.name, row.span, row.offset) for row in rows] == [("a", 0, 40), ("b", 0, 0), ("c", 1, 0)]
    assert inputs_bytes(spans) == 256 + 512 + PAD, "a byte lies behind the last of every span"


def test_an_alignment_is_that_of_all_addresses() -> None:
    assert alignment(4096, 512) == 256 and alignment(4096, 528) == 16 and alignment(3, 8) == 1


def test_parts_that_were_named_are_cut_out_of_a_block() -> None:
    assert list(without(0, 100, [(10, 20), (90, 120)])) == [(0, 10), (20, 90)]
    assert list(without(0, 100, [(0, 100)])) == []
    assert list(without(0, 100, [(200, 300)])) == [(0, 100)]


# --- the file of the first process -----------------------------------------------------------------------------------


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    p = Process(ONE)
    take = p.take([p.kernel(p.x), p.memset(p.cache)], pooled=p.segments[0], pointers=pointers(p, 0, p.x))
    path = tmp_path / "engine.cgb.recording"
    write_recording(path, take)
    assert read_recording(path) == take
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"something else", engine_take.MAGIC, engine_take.MAGIC + pickle.dumps(Evil()),
        engine_take.MAGIC + pickle.dumps(NamedTensor), engine_take.MAGIC + pickle.dumps({"a": 1}),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.cgb.recording"
    path.write_bytes(data)
    with raises("engine-recording-invalid", match="engine.cgb.recording: "):
        read_recording(path)
    assert not capsys.readouterr().out


# --- before anything is read -------------------------------------------------------------------------------------------


def test_a_process_that_nobody_observed_cannot_save(tmp_path: Path) -> None:
    with raises("not-observed", match=r"cgcompile.observe\(\) was not called"):
        save_graphs({}, {}, tmp_path / "engine.cgb")


def test_a_line_is_the_callers() -> None:
    namespace: dict[str, Any] = {}
    library = Path(observe.__file__).parent / "imagined.py"
    exec(compile("def call(f):\n    return f()", str(library), "exec"), namespace)
    assert namespace["call"](observe.line) == f"{__file__}:{LINE + 1}"


LINE = test_a_line_is_the_callers.__code__.co_firstlineno + 3
