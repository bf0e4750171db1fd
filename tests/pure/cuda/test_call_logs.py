"""Loads and calls make the same driver calls with the same arguments as in the recorded logs. After an intended change, `python -m
tests.pure.cuda.test_call_logs` writes new logs."""

from __future__ import annotations

import ctypes
import json
import lzma
import random
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgbundle.errors import CgbundleError
from cgbundle.format import safetensors_files
from cgbundle.format.schema import Manifest
from cgbundle.gpu import host_steps as hoststeps
from cgbundle.program import Program
from cgbundle.tensors.tensor import Tensor, from_bytes
from tests.helpers.bundles import cuda_bundles, donation_bundles, state_bundles
from tests.helpers.bundles.conditional_rows import recording as branching
from tests.helpers.bundles.conditional_rows import several, switching
from tests.helpers.bundles.cuda_bundles import FLOATS, KEYS, inputs
from tests.helpers.bundles.edits import edited
from tests.helpers.drivers.conditional_harness import CASES, RecordingHarness
from tests.helpers.drivers.cuda_calls import call, opened
from tests.helpers.drivers.fake_driver import install
from tests.helpers.drivers.fake_torch import FakeTensor, FakeTorch
from tests.helpers.drivers.logging_driver import LoggingDriver
from tests.pure.cuda.fake_regions import Regions
from tests.pure.cuda.test_host_steps import mixed

LOGS = Path(__file__).with_name("call_logs.json.xz")
CAPTURED = 64
"""A stream that the caller captures."""


class Calls:
    """The fake driver and torch of a scenario, and the lines of its log: a title for each call, followed by its driver calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.driver, self.lines = folder, LoggingDriver(), list[str]()
        self.torch = FakeTorch(self.driver)

    def note(self, title: str, run: Callable[[], Any]) -> Any:
        """Runs a call, and logs its driver calls and the error that it raised."""
        self.driver.taken()
        try:
            result, failed = run(), ""
        except CgbundleError as error:
            result, failed = None, f"  raises {error.code}"
        self.lines += [f"# {title}{failed}", *self.driver.taken()]
        return result

    def on_gpu(self, data: array[float], *shape: int) -> FakeTensor:
        return self.torch.empty(shape, data.tobytes())


def near(key: int, seed: int = 0) -> Tensor:
    """Returns an input on the CPU."""
    return from_bytes(array("f", [(7 * i + 13 * seed) % 32 - 16 for i in range(key * FLOATS)]), "float32", (key, FLOATS))


def far(calls: Calls, data: array[float], *shape: int) -> Tensor:
    """Returns a tensor on the GPU that belongs to no library."""
    value = calls.on_gpu(data, *shape)
    return Tensor(value.address, "float32", shape, None, value, 0)


def plain(folder: Path, pad: str = "rows", **changes: Any) -> Manifest:
    """Writes the bundle of `cuda_bundles` with a signature; its rows are independent."""
    manifest = cuda_bundles.write(folder, b"an image")
    signed = state_bundles.write(folder.with_name("signed.cgb")).entries[0]
    changed: Manifest = edited(
        manifest,
        dimensions=(replace(signed.dimensions[0], pad=pad, chunk=pad != "no", reason="they are"),),
        inputs=signed.inputs,
        outputs=signed.outputs[:1],
        call=signed.call,
        parameters=signed.parameters,
        result={"tensor": 0},
        **changes,
    )
    return changed


def in_one_step(manifest: Manifest) -> Manifest:
    """Removes the copy step of each program: the output is the value that the recording writes."""
    rows = manifest.entries[0].programs
    changed: Manifest = edited(manifest, programs=tuple([replace(row, steps=row.steps[:1], outputs=(1,)) for row in rows]))
    return changed


def program(calls: Calls, manifest: Manifest, mode: str, outputs: str, **options: Any) -> Program:
    backend = calls.note(f"load {mode} {options}", lambda: opened(manifest, calls.folder / "model.cgb", 0, mode, **options))
    return Program(manifest, backend, "chunk", outputs)


def calls_of_plain(calls: Calls, program: Program) -> None:
    """Makes every kind of call with one input: first in a fixed order, then in a random one."""
    torch, same = calls.torch, [calls.on_gpu(inputs(key), key, FLOATS) for key in KEYS]

    def fresh(key: int, seed: int) -> FakeTensor:
        return calls.on_gpu(inputs(key, seed), key, FLOATS)

    calls.note("of the GPU", lambda: program(same[0]))
    calls.note("again", lambda: program(same[0]))
    calls.note("another tensor", lambda: program(fresh(KEYS[0], 1)))
    calls.note("another size", lambda: program(same[1]))
    calls.note("by name", lambda: program(x=same[0]))
    torch.current = 512
    calls.note("another stream", lambda: program(same[0]))
    calls.note("again on it", lambda: program(fresh(KEYS[0], 2)))
    torch.current = 0
    calls.note("back", lambda: program(same[0]))
    calls.note("where memory is not aligned", lambda: program(FakeTensor(same[0].address + 64, same[0].shape, same[0])))
    calls.note("the static buffer", lambda: program(FakeTensor(program.buffers((KEYS[0],))[0].address, (KEYS[0], FLOATS), program)))
    calls.note("of the CPU", lambda: program(near(KEYS[0])))
    for size in (1, 3, 5, 7, 9, 13, 40):
        calls.note(f"of the CPU, {size} rows", lambda size=size: program(near(size)))
    calls.note("another rank", lambda: program(calls.on_gpu(inputs(4), 4 * FLOATS)))
    torch.current, torch.capturing = CAPTURED, True
    calls.driver.capturing.add(CAPTURED)
    calls.note("inside a capture", lambda: program(same[0]))
    calls.note("again inside", lambda: program(same[0]))
    calls.note("inside, of the CPU", lambda: program(near(KEYS[0])))
    calls.driver.capturing.clear()
    torch.current, torch.capturing = 0, False
    calls.note("behind the capture", lambda: program(same[0]))
    drawn = random.Random(0)
    for number in range(60):
        key, way = drawn.choice(KEYS), drawn.randrange(4)
        torch.current = drawn.choice((0, 0, 0, 1, 512, 513))
        value = fresh(key, number) if way == 1 else near(drawn.randrange(1, 12)) if way == 2 else same[KEYS.index(key)]
        calls.note(f"{number}: way {way}, key {key}, stream {torch.current}", lambda value=value: program(value))
    torch.current = 0


def copies_and_views(calls: Calls, mode: str, outputs: str) -> None:
    model = program(calls, plain(calls.folder / "model.cgb"), mode, outputs)
    calls_of_plain(calls, model)
    calls.note("close", model.close)


def one_step(calls: Calls, mode: str, outputs: str) -> None:
    model = program(calls, in_one_step(plain(calls.folder / "model.cgb")), mode, outputs, poison=0xA5)
    calls_of_plain(calls, model)
    calls.note("close", model.close)


def lazy(calls: Calls, mode: str, outputs: str) -> None:
    model = program(calls, plain(calls.folder / "model.cgb", "no"), mode, outputs, lazy=True)
    calls_of_plain(calls, model)
    calls.note("close", model.close)


def written(calls: Calls, mode: str, outputs: str) -> None:
    """Logs calls that mutate the caller's tensor."""
    model = program(calls, plain(calls.folder / "model.cgb", "no", mutated_inputs=(0,)), mode, outputs)
    calls_of_plain(calls, model)
    calls.note("close", model.close)


def state(calls: Calls, mode: str, outputs: str) -> None:
    model = program(calls, state_bundles.write(calls.folder / "model.cgb"), mode, outputs)
    first = far(calls, inputs(KEYS[0]), KEYS[0], FLOATS)
    rows: list[tuple[str, Callable[[], Any]]] = [
        ("of the CPU", lambda: model(near(4))), ("of the GPU", lambda: model(first)), ("again", lambda: model(first)),
        ("read state", lambda: model.state["total"]), ("reset", model.reset), ("seed", lambda: model.seed(7)),
        ("write state", lambda: model.state.__setitem__("total", from_bytes(bytes(64), "float32", (16,)))),
        ("write state of the GPU", lambda: model.state.__setitem__("total", far(calls, inputs(1), 16))),
        ("profile", lambda: profiled(model, first)), ("poison", lambda: model.poison(0xFF)),
        ("another size", lambda: model(near(8))),
    ]  # fmt: skip
    for title, run in rows:
        calls.note(title, run)
    session = calls.note("session", model.session)
    for title, run in (("of the session", lambda: session(near(8))), ("of the GPU", lambda: session(first))):
        calls.note(title, run)
    calls.note("close the session", session.close)
    calls.note("another session", model.session)
    calls.note("close", model.close)


def profiled(program: Program, value: Any) -> None:
    with program.profile():
        program(value)
        program(value)


def donations(calls: Calls, mode: str, outputs: str) -> None:
    model = program(calls, donation_bundles.write(calls.folder / "model.cgb"), mode, outputs)
    drawn, lying = random.Random(1), list[Any]()
    for number in range(40):
        entry = drawn.choice(("make", "again", "take"))
        tensors = [calls.on_gpu(donation_bundles.numbers(number + at), donation_bundles.N) for at in range(2)]
        chosen = [drawn.choice([*lying[-3:], value]) for value in tensors][: 2 if entry == "take" else 1]
        answer = calls.note(f"{number}: {entry}", lambda entry=entry, chosen=chosen: model[entry](*chosen))
        if answer is not None:
            lying.append(answer)
    calls.note("poison", lambda: model.poison(0xFF, reserved=False))
    calls.note("close", model.close)


def update(calls: Calls, mode: str, outputs: str) -> None:
    model = program(calls, plain(calls.folder / "model.cgb"), mode, outputs)
    count, session = KEYS[-1] * FLOATS, model.session()
    named = {"offsets": from_bytes(array("f", [5.0] * count), "float32", (count,)), "small": from_bytes(b"xyz", "uint8", (3,))}
    with open(calls.folder / "new.safetensors", "wb") as file:
        rows = {"tied": ("float32", (count,), lambda: array("f", [3.0] * count)), "small": ("uint8", (3,), lambda: b"xyz")}
        safetensors_files.write(file, rows)
    calls.note("tensors", lambda: model.update(named))
    calls.note("a file", lambda: model.update(calls.folder / "new.safetensors"))
    calls.note("of the GPU", lambda: model.update({"offsets": calls.on_gpu(array("f", [1.0] * count), count)}, partial=True))
    calls.note("one is missing", lambda: model.update({"small": named["small"]}))
    calls.note("warmup", lambda: model(near(4)))
    calls.note("of the session", lambda: session(near(4)))
    session.close()
    calls.note("close", model.close)


def conditional(calls: Calls, mode: str, outputs: str) -> None:
    if outputs == "view":
        rows: list[Any] = [branching, switching]
    else:
        rows = [lambda image: several(image, 3, nested=True)]
    for number, row in enumerate(rows):
        with ExitStack() as cleanup:
            table = RecordingHarness(calls.folder / f"{number}.cgb", b"an image", cleanup, row)
            executor = calls.note("build", lambda table=table: table.executor(mode))
            for choices, flag in CASES:
                table.fill_arena(choices, flag)
                calls.note(f"launch {choices} {flag}", lambda executor=executor, table=table: executor.launch(table.context.stream))
            calls.note("close", executor.close)


def host_steps(calls: Calls, mode: str, outputs: str) -> None:
    """Logs calls with graphs, copies and host steps. The caller gets no outputs, because this bundle has no signature."""
    regions, manifest = Regions(), cuda_bundles.write(calls.folder / "model.cgb", b"an image")
    manifest = mixed(manifest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hoststeps, "open_region", regions.open)
        patch.setattr(hoststeps, "libtorch", SimpleNamespace(load=regions.load))
        backend = calls.note("load", lambda: opened(manifest, calls.folder / "model.cgb", 0, mode, lazy=outputs == "view"))
        for number, stream in ((0, None), (1, 512), (1, None), (0, 0)):
            data = inputs(KEYS[number], number)
            calls.note(f"program {number} on {stream}", lambda: call(backend, number, data, stream))  # noqa: B023
        backend.close()


SCENARIOS = (host_steps, copies_and_views, one_step, lazy, written, state, donations, update, conditional)
CASES_OF_ALL = [(scenario, mode, outputs) for scenario in SCENARIOS for mode in ("graph", "stream") for outputs in ("copy", "view")]


@contextmanager
def installed() -> Iterator[Calls]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        calls = Calls(Path(folder))
        install(patch, calls.driver)
        patch.setitem(sys.modules, "torch", calls.torch)  # type: ignore[arg-type]
        yield calls
        calls.torch.forget()
        calls.driver.live = {at: item for at, item in calls.driver.live.items() if not isinstance(item, ctypes.Array)}


def log_of(scenario: Callable[..., None], mode: str, outputs: str) -> list[str]:
    with installed() as calls:
        scenario(calls, mode, outputs)
        return calls.lines


def name_of(scenario: Callable[..., None], mode: str, outputs: str) -> str:
    return f"{scenario.__name__}, {mode}, {outputs}"


@pytest.fixture(scope="module")
def logs() -> dict[str, list[str]]:
    with lzma.open(LOGS, "rt") as file:
        stored: dict[str, list[str]] = json.load(file)
    return stored


@pytest.mark.parametrize(("scenario", "mode", "outputs"), CASES_OF_ALL)
def test_driver_calls_are_those_of_the_logs(
    logs: dict[str, list[str]], scenario: Callable[..., None], mode: str, outputs: str
) -> None:
    assert log_of(scenario, mode, outputs) == logs[name_of(scenario, mode, outputs)]


if __name__ == "__main__":
    with lzma.open(LOGS, "wt") as out:
        json.dump({name_of(*case): log_of(*case) for case in CASES_OF_ALL}, out, indent=1)
