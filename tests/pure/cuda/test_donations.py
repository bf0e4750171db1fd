"""A later call reads donated outputs in place, on a fake driver: without a copy and without overwriting them. Results are right in
any order of calls."""

from __future__ import annotations

import ctypes
import random
from array import array
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cgbundle.cuda import memory
from cgbundle.errors import CgbundleError
from cgbundle.format.schema import Manifest
from cgbundle.gpu import device_bundle as shared
from cgbundle.gpu.backend import CudaBackend
from cgbundle.gpu.moves import with_inputs_at
from cgbundle.program import Program
from cgbundle.program.opening import MODES
from cgbundle.self_test import replay_chained
from cgbundle.tensors.tensor import Tensor
from cgcompile.bundle import recordings as tables
from tests.helpers.bundles import donation_bundles
from tests.helpers.bundles.cuda_bundles import ARENA_AT
from tests.helpers.bundles.donation_bundles import ADDS, AGAIN_AT, MAKE_AT, SIZE, N, numbers, taken, twice, write
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.fabricate import kept_self_test
from tests.helpers.drivers.cuda_calls import opened
from tests.helpers.drivers.fake_driver import FakeDriver, install
from tests.helpers.raising import raises

MAKE, AGAIN, TAKE = range(3)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write(tmp_path / "chained.cgb")


class Calls:
    """Makes calls of the backend with the caller's tensors in the driver's memory."""

    def __init__(self, fake: FakeDriver, backend: CudaBackend) -> None:
        self.fake, self.backend, self.buffers = fake, backend, []

    def tensor(self, data: array[float]) -> int:
        self.buffers.append(array("f", data))
        return int(self.buffers[-1].buffer_info()[0])

    def __call__(self, program: int, *addresses: int) -> int:
        with self.backend.locked(None) as stream:
            (address,) = self.backend.run(program, addresses, 0, stream).addresses
        return address

    def copied(self, program: int, *addresses: int) -> tuple[int, int]:
        """Returns (the output's address, the copies that the call made)."""
        before = self.fake.calls.count("cuMemcpyDtoDAsync")
        return self(program, *addresses), self.fake.calls.count("cuMemcpyDtoDAsync") - before


def read(address: int) -> array[float]:
    return array("f", ctypes.string_at(address, SIZE))


@pytest.mark.parametrize("mode", MODES)
def test_a_donated_input_is_not_copied(fake: FakeDriver, manifest: Manifest, tmp_path: Path, mode: str) -> None:
    backend = opened(manifest, tmp_path / "chained.cgb", mode=mode)
    call = Calls(fake, backend)
    x, y = numbers(1), numbers(2)
    make_output = call(MAKE, call.tensor(x))
    out, copies = call.copied(TAKE, make_output, call.tensor(y))
    assert (read(out), copies) == (taken(twice(x), y), 1)
    out, copies = call.copied(TAKE, make_output, make_output)
    assert (read(out), copies) == (taken(twice(x), twice(x)), 0)
    again, copies = call.copied(AGAIN, make_output)
    assert (read(again), copies) == (twice(twice(x)), 0)
    out, copies = call.copied(TAKE, make_output, again)  # outputs of two entries
    assert (read(out), copies) == (taken(twice(x), twice(twice(x))), 0)
    out, copies = call.copied(TAKE, again, make_output)  # this output is not donated to the first input
    assert (read(out), copies) == (taken(twice(twice(x)), twice(x)), 1)
    again, copies = call.copied(AGAIN, again)  # its own output would be overwritten, so it is copied
    assert (read(again), copies) == (twice(twice(twice(x))), 1)
    backend.close()


def test_what_an_entry_may_take_of_another_is_built_at_load(fake: FakeDriver, manifest: Manifest, tmp_path: Path) -> None:
    backend = opened(manifest, tmp_path / "chained.cgb")
    call = Calls(fake, backend)
    built = fake.calls.count("cuGraphInstantiate")
    assert built == 3 + 3  # of `take`: for both inputs from `make`, and for one from `again`; of `again`: for an input from `make`
    make_output = call(MAKE, call.tensor(numbers(0)))
    again = call(AGAIN, make_output)
    call(TAKE, make_output, make_output)
    assert fake.calls.count("cuGraphInstantiate") == built
    call(TAKE, make_output, again)  # outputs of different entries
    call(TAKE, make_output, again)
    assert fake.calls.count("cuGraphInstantiate") == built + 1
    backend.close()


def test_a_lazy_load_builds_what_is_taken(fake: FakeDriver, manifest: Manifest, tmp_path: Path) -> None:
    backend = opened(manifest, tmp_path / "chained.cgb", lazy=True)
    call = Calls(fake, backend)
    assert "cuGraphInstantiate" not in fake.calls
    make_output = call(MAKE, call.tensor(numbers(3)))
    assert read(call(TAKE, make_output, call.tensor(numbers(4)))) == taken(twice(numbers(3)), numbers(4))
    backend.close()


@pytest.mark.parametrize("mode", MODES)
def test_calls_in_any_order_over_a_poisoned_arena(fake: FakeDriver, manifest: Manifest, tmp_path: Path, mode: str) -> None:
    backend, drawn = opened(manifest, tmp_path / "chained.cgb", mode=mode, poison=0xFF), random.Random(0)
    call = Calls(fake, backend)
    lying: dict[int, tuple[int, array[float]]] = {}  # address and contents of the last output of an entry
    for number in range(300):
        program = drawn.choice([MAKE, AGAIN, TAKE])
        arguments: list[tuple[int, array[float]]] = []
        for _ in range(2 if program == TAKE else 1):
            fresh = numbers(number)
            arguments.append(drawn.choice([*lying.values(), (call.tensor(fresh), fresh)]))
        address = call(program, *[where for where, _ in arguments])
        expected = taken(arguments[0][1], arguments[1][1]) if program == TAKE else twice(arguments[0][1])
        assert read(address) == expected
        backend.poison(0xFF, reserved=False)
        if program != TAKE:
            lying[program] = address, expected
        if max(map(abs, expected)) > 1e6:
            lying.clear()
        for where, data in lying.values():
            assert read(where) == data
    backend.poison(0xFF)
    assert all(value != value for value in read(call.backend._memories.address("arena", MAKE_AT)))
    backend.close()


def test_inputs_of_the_host_and_a_session(fake: FakeDriver, manifest: Manifest, tmp_path: Path) -> None:
    backend = opened(manifest, tmp_path / "chained.cgb")
    call, x = Calls(fake, backend), numbers(5)
    make_output = call(MAKE, call.tensor(x))
    session = backend.session()
    other = Calls(fake, session)
    assert read(other(TAKE, make_output, make_output)) == taken(twice(x), twice(x))  # copied: it is of another session
    session.close()
    backend.close()


def views(manifest: Manifest, folder: Path, outputs: str = "view") -> Program:
    return Program(manifest, opened(manifest, folder), "pad", outputs)


def device(call: Calls, data: array[float]) -> Tensor:
    return Tensor(call.tensor(data), "float32", (N,), None, call, 0)


def test_a_view_is_an_input_and_stays_until_its_entry_is_called(fake: FakeDriver, manifest: Manifest, tmp_path: Path) -> None:
    with views(manifest, tmp_path / "chained.cgb") as program:
        call, x, y = Calls(fake, program._backend), numbers(6), numbers(7)
        make_output = program.make(device(call, x))
        before = fake.calls.count("cuMemcpyDtoDAsync")
        out = program.take(make_output, device(call, y))
        assert fake.calls.count("cuMemcpyDtoDAsync") == before + 1
        assert read(out.tensor.address) == taken(twice(x), y)
        again = program.again(make_output)
        assert read(program.take(make_output, again).tensor.address) == taken(twice(x), twice(twice(x)))
        with raises("stale-view", match="output 'output' of call 2 was read after call 4"):
            out.tensor  # noqa: B018  no donation leads from there
        assert read(make_output.tensor.address) == twice(x)
        program.make(device(call, y))
        with raises("stale-view", match="output 'output' of call 1 of 'make' was read after call 2 of 'make'"):
            program.take(make_output, make_output)
        assert read(again.tensor.address) == twice(twice(x))
    with raises("stale-view", match="the program was closed"):
        again.tensor  # noqa: B018


def test_a_stale_view_is_refused_before_anything_runs(fake: FakeDriver, manifest: Manifest, tmp_path: Path) -> None:
    with views(manifest, tmp_path / "chained.cgb") as program:
        call = Calls(fake, program._backend)
        loose = program.take(device(call, numbers(0)), device(call, numbers(1)))
        first = program.make(device(call, numbers(2)))
        launches = fake.calls.count("cuGraphLaunch")
        for wrong in (lambda: program.again(loose), lambda: program.take(first, loose)):
            with raises("stale-view"):
                wrong()
        assert fake.calls.count("cuGraphLaunch") == launches
        assert read(first.tensor.address) == twice(numbers(2))


def test_copies_are_copied_in(fake: FakeDriver, manifest: Manifest, tmp_path: Path) -> None:
    with views(manifest, tmp_path / "chained.cgb", "copy") as program:
        call, x = Calls(fake, program._backend), numbers(8)
        make_output = program.make(device(call, x))
        arena = program._backend._memories.address("arena", 0)
        assert not arena + MAKE_AT <= make_output.address < arena + AGAIN_AT
        assert read(program.take(make_output, make_output).address) == taken(twice(x), twice(x))


def test_a_profile_of_chained_calls(fake: FakeDriver, manifest: Manifest, tmp_path: Path) -> None:
    with views(manifest, tmp_path / "chained.cgb") as program:
        call, x = Calls(fake, program._backend), numbers(9)
        for _ in range(2):
            with program.profile() as profile:
                make_output = program.make(device(call, x))
                assert read(program.take(make_output, make_output).tensor.address) == taken(twice(x), twice(x))
            assert sum(span.track == profile.GPU for span in profile.spans) == 2
        assert read(program.take(make_output, make_output).tensor.address) == taken(twice(x), twice(x))


def test_a_call_inside_a_capture(fake: FakeDriver, manifest: Manifest, tmp_path: Path) -> None:
    backend = opened(manifest, tmp_path / "chained.cgb", lazy=True)
    call = Calls(fake, backend)
    make_output = call(MAKE, call.tensor(numbers(0)))
    call(TAKE, call.tensor(numbers(0)), call.tensor(numbers(0)))  # a graph is built, but not for an input from `make`
    fake.capturing.add(77)
    with raises("capture-refused"), backend.locked(77) as stream:
        backend.run(TAKE, [make_output, make_output], 0, stream)
    fake.capturing.discard(77)
    assert read(call(TAKE, make_output, make_output)) == taken(twice(numbers(0)), twice(numbers(0)))
    backend.close()


def test_a_failed_driver_call_leaks_nothing(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, number = 1, 0
    while number < count:
        fake = FakeDriver()
        fake.fail_at = number
        install(monkeypatch, fake)
        with suppress(CgbundleError):
            opened(manifest, tmp_path / "chained.cgb").close()
        assert not fake.live and fake.retained == 0, (number, fake.calls[number])
        count, number = max(count, len(fake.calls)), number + 7


def test_an_address_behind_the_last_byte_moves_along(manifest: Manifest) -> None:
    take = manifest.entries[2].programs[0]
    moved, moves = with_inputs_at(take, ((0, 40), (1, 80)))
    assert [(move.begin, move.end, move.offset) for move in moves] == [(0, SIZE + 1, 40), (512, 512 + SIZE + 1, 80)]
    assert [moved.values[index].memory for index in moved.inputs] == ["arena", "arena"]
    close = replace(take, values=(take.values[0], replace(take.values[1], offset=SIZE), take.values[2]))
    _, moves = with_inputs_at(close, ((0, 40),))
    assert moves[0].end == SIZE  # not one byte more: the next input begins there


def examined(manifest: Manifest, folder: Path) -> list[tuple[str, bool]]:
    with Program(manifest, opened(manifest, folder), "pad", "copy", self_test=kept_self_test(str(folder))) as program:
        return [(row.title, row.passed) for row in replay_chained(program)]


def test_the_self_test_of_donations(fake: FakeDriver, manifest: Manifest, tmp_path: Path) -> None:
    verdicts = examined(manifest, tmp_path / "chained.cgb")
    assert sorted(verdicts) == [("again -> again", True), ("again -> take", True), ("make -> again", True), ("make -> take", True)]


@pytest.mark.parametrize("place", [MAKE_AT, MAKE_AT + SIZE // 2])
def test_the_self_test_sees_a_taker_that_writes_over_what_it_takes(
    fake: FakeDriver, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    (one, two), (out, _, other) = ADDS["take"][0][1:], ADDS["take"][1]
    broken = [((ARENA_AT, place), one, two), (out, (ARENA_AT, place), other)]
    monkeypatch.setitem(donation_bundles.ADDS, "take", broken)
    image = manifest.files[[file.path.startswith("kernels/") for file in manifest.files].index(True)].sha256
    (tmp_path / "chained.cgb/graphs/take.bin").write_bytes(tables.encode(donation_bundles.recording(image, "take")))
    assert ("make -> take", False) in examined(manifest, tmp_path / "chained.cgb")


def test_the_self_test_sees_what_is_not_reserved(fake: FakeDriver, manifest: Manifest, tmp_path: Path) -> None:
    short = edited(manifest, donated=(replace(manifest.donated[0], bytes=SIZE - 4), manifest.donated[1]))
    assert ("make -> take", False) in examined(short, tmp_path / "chained.cgb")


def test_calls_like_one_before(fake: FakeDriver, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls like an earlier one go directly to their replay, also with views."""
    with views(manifest, tmp_path / "chained.cgb") as program:
        call, x = Calls(fake, program._backend), numbers(3)
        for turn in range(3):
            make_output = program.make(device(call, x))
            before = fake.calls.count("cuMemcpyDtoDAsync")
            out = program.take(make_output, make_output)
            assert fake.calls.count("cuMemcpyDtoDAsync") == before
            assert read(out.tensor.address) == taken(twice(x), twice(x))
            if not turn:
                for entry in (program.make, program.take):
                    assert entry._known
                    monkeypatch.setattr(entry, "_replay", None)
        stale, make_output = make_output, program.make(device(call, x))
        with raises("stale-view", match="call 3 of 'make' was read after call 4 of 'make'"):
            program.take(make_output, stale)


def test_what_is_asked_of_the_driver(fake: FakeDriver, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    allocate = memory.allocate

    def counted(size: int, what: str) -> int:
        asked.append(size)
        return allocate(size, what)

    for module in (memory, shared):
        monkeypatch.setattr(module, "allocate", counted)
    with views(manifest, tmp_path / "chained.cgb") as program:
        call = Calls(fake, program._backend)
        make_output = program.make(device(call, numbers(0)))
        program.take(make_output, make_output)
        assert sorted(asked) == sorted(program.memory.values())
