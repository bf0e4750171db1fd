"""A launch also copies the outputs, on a fake driver: one driver call for each, with the right bytes for any sequence of addresses.
A launch without a target copies nothing."""

from __future__ import annotations

import ctypes
import mmap
import random
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgbundle.call.outputs import Caller as MadeBy
from cgbundle.cuda import graph_executor
from cgbundle.cuda.graph_executor import GraphExecutor
from cgbundle.cuda.libcuda import answers
from cgbundle.errors import CgbundleError, MachineError
from cgbundle.format.schema import Manifest, Program
from cgbundle.gpu.backend import CudaBackend
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.manifest_text import describe_files
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.cuda_bundles import FLOATS, KEYS, expected, inputs
from tests.helpers.bundles.edits import edited
from tests.helpers.drivers.conditional_harness import RecordingHarness
from tests.helpers.drivers.cuda_calls import opened
from tests.helpers.drivers.fake_driver import FakeDriver, install

N = KEYS[0] * FLOATS
AIM, SWITCH, COPY, LAUNCH = "cuGraphExecMemcpyNodeSetParams", "cuGraphNodeSetEnabled", "cuMemcpyDtoDAsync", "cuGraphLaunch"


def in_one_step(program: Program, outputs: tuple[int, ...] = (1,)) -> Program:
    """Returns the program without the step that copies the result to the output."""
    return replace(program, steps=program.steps[:1], outputs=outputs)


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Manifest, Path]:
    manifest = cuda_bundles.write(tmp_path / "tiny.cgb", b"an image")
    return edited(manifest, programs=tuple(map(in_one_step, manifest.entries[0].programs))), tmp_path / "tiny.cgb"


class Caller:
    """Makes direct calls of the first key, each with new numbers and its own copy of the output."""

    def __init__(self, fake: FakeDriver, backend: CudaBackend, outputs: int = 1) -> None:
        self.fake, self.backend, self.outputs, self.stream = fake, backend, outputs, 0
        self._page = mmap.mmap(-1, 4096)  # inputs with this alignment are read in place
        self.address = ctypes.addressof((ctypes.c_char * 4096).from_buffer(self._page))
        self.buffers: list[list[Any]] = []
        self.none = False
        caller = MadeBy(lambda device: self.stream, [SimpleNamespace(number=0)], self.finish, self.fresh)
        line = backend.fast_path(0, caller)
        assert line is not None
        self.line = line

    def fresh(self) -> tuple[Any, list[int]] | None:
        if self.none:
            return None
        self.buffers.append([ctypes.create_string_buffer(4 * N) for _ in range(self.outputs)])
        return self.buffers[-1], [ctypes.addressof(buffer) for buffer in self.buffers[-1]]

    def finish(self, stream: Any) -> list[Any]:
        """Copies the outputs as the library does when the launch copies nothing."""
        copies = [ctypes.create_string_buffer(4 * N) for _ in range(self.outputs)]
        for buffer, address in zip(copies, self.backend._programs.ready[0].results.addresses, strict=True):
            self.backend.copy(ctypes.addressof(buffer), address, 4 * N, stream)
        return copies

    def __call__(self, seed: int) -> list[str]:
        """Returns the driver calls of a call whose copies are right."""
        ctypes.memmove(self.address, inputs(KEYS[0], seed).tobytes(), 4 * N)
        before = len(self.fake.calls)
        for output in self.line([self.address], ()):
            assert array("f", output.raw) == expected(inputs(KEYS[0], seed))
        return [name for name in self.fake.calls[before:] if name in (AIM, SWITCH, COPY, LAUNCH)]

    def plain(self, seed: int) -> list[str]:
        """Returns the driver calls of a call that is not direct."""
        ctypes.memmove(self.address, inputs(KEYS[0], seed).tobytes(), 4 * N)
        before = len(self.fake.calls)
        with self.backend.locked(None) as stream:
            (output,) = self.backend.run(0, [self.address], 0, stream).addresses
        assert array("f", ctypes.string_at(output, 4 * N)) == expected(inputs(KEYS[0], seed))
        return [name for name in self.fake.calls[before:] if name in (AIM, SWITCH, COPY, LAUNCH)]


@pytest.fixture
def caller(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> Iterator[Caller]:
    calls = Caller(fake, opened(*bundle))
    yield calls
    calls.backend.close()


def test_a_call_sets_where_its_copy_goes(caller: Caller) -> None:
    caller(0)
    assert caller(1) == [AIM, LAUNCH]
    caller.stream = 64
    assert caller(2) == [AIM, LAUNCH]


def test_a_launch_without_a_target_copies_nothing(caller: Caller) -> None:
    caller(0)
    (kept,) = caller.buffers[-1]
    assert caller.plain(1) == [SWITCH, LAUNCH]
    assert caller.plain(2) == [LAUNCH]
    assert array("f", kept.raw) == expected(inputs(KEYS[0], 0))
    assert caller(3) == [SWITCH, AIM, LAUNCH]


def test_before_the_first_such_call_nothing_is_copied(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    caller = Caller(fake, opened(*bundle))
    assert caller.plain(0) == [LAUNCH]
    caller.backend.close()


def test_any_order(caller: Caller) -> None:
    rng, kept = random.Random(0), []
    for seed in range(60):
        way = rng.choice(("direct", "direct", "plain", "refused", "none"))
        caller.none = way == "none"
        if way == "plain":
            caller.plain(seed)
            continue
        if way == "refused":
            fresh = caller.fresh()
            assert fresh is not None
            caller.fake.refused.update(fresh[1])
            caller.fresh, before = (lambda fresh=fresh: fresh), caller.fresh  # type: ignore[method-assign, misc]
            line = caller.backend.fast_path(0, MadeBy(lambda device: 0, [], caller.finish, caller.fresh))
            assert line is not None
            ctypes.memmove(caller.address, inputs(KEYS[0], seed).tobytes(), 4 * N)
            (output,) = line([caller.address], ())
            assert array("f", output.raw) == expected(inputs(KEYS[0], seed)) and output is not fresh[0][0]
            caller.fresh = before  # type: ignore[method-assign]
            caller.fake.refused.clear()
            continue
        caller(seed)
        if way == "direct":
            kept.append((seed, caller.buffers[-1][0]))
    for seed, copy in kept:
        assert array("f", copy.raw) == expected(inputs(KEYS[0], seed))


def test_a_capture_copies_to_what_the_caller_keeps(caller: Caller) -> None:
    """The caller's graph contains the recording and a copy to that call's output, but no node that other calls change."""
    caller(0)
    graphs = len(caller.fake.live)
    caller.fake.capturing.add(64)
    caller.stream = 64
    (copy,) = caller.line([caller.address], ())
    caller.fake.capturing.clear()
    caller.stream = 0
    assert len(caller.fake.live) == graphs
    for seed in (6, 7):
        caller(seed + 10)
        (kept,) = caller.buffers[-1]
        ctypes.memmove(caller.address, inputs(KEYS[0], seed).tobytes(), 4 * N)
        for run in caller.fake.captured:
            run()
        assert array("f", copy.raw) == expected(inputs(KEYS[0], seed))
        assert array("f", kept.raw) == expected(inputs(KEYS[0], seed + 10))


def test_several_outputs(fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, folder = bundle
    twice = edited(manifest, programs=tuple(replace(program, outputs=(1, 1)) for program in manifest.entries[0].programs))
    caller = Caller(fake, opened(twice, folder), outputs=2)
    caller(0)
    assert caller(1) == [AIM, AIM, LAUNCH]
    caller.backend.close()
    monkeypatch.setattr(graph_executor, "COPIES", 1)
    caller = Caller(fake, opened(twice, folder), outputs=2)
    assert caller(0) == [LAUNCH, COPY, COPY]
    caller.backend.close()


@pytest.mark.parametrize("why", ["mode stream", "of two programs", "no outputs", "empty output", "two steps"])
def test_others_have_no_such_launch(fake: FakeDriver, bundle: tuple[Manifest, Path], why: str) -> None:
    manifest, folder = bundle
    one, other = manifest.entries[0].programs
    changed = {
        "of two programs": replace(other, steps=one.steps, values=one.values, arena=one.arena),
        "no outputs": replace(other, outputs=()),
        "empty output": replace(other, values=(*other.values, replace(other.values[1], shape=(0, FLOATS))), outputs=(3,)),
        "two steps": cuda_bundles.program(KEYS[1]),
    }
    mode = "stream" if why == "mode stream" else "graph"
    backend = opened(edited(manifest, programs=(one, changed.get(why, other))), folder, mode=mode)
    assert backend._programs.ready[1].copying is None
    assert (backend._programs.ready[0].copying is None) == (why in ("mode stream", "of two programs"))
    backend.close()


def test_a_recording_with_conditional_nodes_has_none(fake: FakeDriver, tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        harness = RecordingHarness(tmp_path / "harness.cgb", b"an image", cleanup)
        stream, bases = harness.context.stream, harness.memories.bases
        executor = GraphExecutor(harness.context, harness.table, harness.modules, bases, stream, outputs=[(bases[3], 4)])
        assert executor.copying() is None
        executor.close()


def test_a_copy_waits_for_the_last_nodes(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    """The copy waits only for nodes without a successor: 86 edges to a copy cost a GPT 4 to 13 us on the GPU."""
    manifest, folder = bundle
    file = manifest.entries[0].programs[0].steps[0].file
    image = next(file.sha256 for file in manifest.files if file.path.startswith("kernels/"))
    recording = cuda_bundles.recording(image, KEYS[0])
    early = [replace(edge, type=1, from_port=1) if (edge.source, edge.target) == (1, 0) else edge for edge in recording.edges]
    nodes = (*recording.nodes, replace(recording.nodes[3], value=7))
    (folder / file).write_bytes(tables.encode(replace(recording, edges=tuple(early), nodes=nodes)))
    backend = opened(replace(manifest, files=describe_files(str(folder))), folder)
    graph = next(item for item in fake.live.values() if isinstance(item, SimpleNamespace) and len(getattr(item, "nodes", [])) == 7)
    *_, empty, fill, copy = graph.nodes
    before = [id(source) for source, target in graph.edges if target is copy]
    assert sorted(before) == sorted([id(empty), id(fill)])
    backend.close()


def test_a_failed_call_leaves_the_next_one_right(monkeypatch: pytest.MonkeyPatch, bundle: tuple[Manifest, Path]) -> None:
    counted = FakeDriver()
    install(monkeypatch, counted)
    caller = Caller(counted, opened(*bundle))

    def calls() -> None:
        caller(1)
        caller.plain(2)
        caller(3)

    first = len(counted.calls)
    calls()
    failures = 0
    for number in range(len(counted.calls) - first):
        counted.fail_at = len(counted.calls) + number
        try:
            calls()
        except CgbundleError:
            failures += 1
        if counted.fail_at < len(counted.calls) and counted.calls[counted.fail_at] == "cuCtxPopCurrent":
            counted._current.stack.pop()  # the failed pop has left the context on the stack
        counted.fail_at = -1
        assert not counted._current.stack
        calls()
    assert failures > 6
    caller.backend.close()
    assert not [item for item in counted.live.values() if isinstance(item, list)]


@pytest.mark.parametrize("failing", ["cuGraphAddMemcpyNode", "cuGraphAddDependencies", SWITCH])
def test_a_load_that_fails_gives_everything_back(fake: FakeDriver, bundle: tuple[Manifest, Path], failing: str) -> None:
    call, copies = getattr(fake, f"do_{failing}"), []

    def fails(*arguments: Any) -> Any:
        copies.append(arguments)
        last = len(copies) == (1 if failing == SWITCH else 2)  # the recording itself has a copy and edges
        return call(*arguments) if not last else (719, None) if answers(failing) else 719

    setattr(fake, f"do_{failing}", fails)
    with pytest.raises(MachineError, match=failing):
        opened(*bundle)
