"""Sessions, state, seeds, static inputs and shared outputs of a CPU bundle: its manifest is handmade, and AOTInductor compiled its
code."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import cgbundle
from cgbundle.cpu import libtorch
from cgbundle.cpu.host_region import HostRegion
from cgbundle.errors import SessionBusy
from cgbundle.format import file_names, safetensors_files
from cgbundle.format.schema import Alias, Program, Region, Step, Target, TensorSpec, Value, Weight
from cgbundle.tensors.tensor import from_bytes
from cgcompile.targets.cpu.aoti import compile_cpu
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.edits import edited
from tests.helpers.raising import raises

FILE = "host/cell.so"
SIZES = (2, 5)
WIDTH = 32
SPIN = 200
"""Calls of every thread."""


class Cell(torch.nn.Module):
    """A recurrent cell: `memory` decays and adds the mean of the rows; `steps` starts at 10 and grows by 1 to 4 per call."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
        self.register_buffer("memory", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("steps", torch.arange(10, 14))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        activation = torch.tanh(x @ self.weight + self.memory)
        self.memory.mul_(0.5).add_(activation.mean(0))
        self.steps.add_(torch.arange(1, 5))
        return activation, self.memory, self.weight, activation[:, :4], x, x[:, 1:]


OUTPUTS = ("made", "memory", "weight", "first", "same", "rest")


def example(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def stored(tensor: torch.Tensor) -> safetensors_files.Tensor:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), lambda: tensor.detach().contiguous().numpy().tobytes()


def value(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Value:
    return Value(dtype="float32", shape=shape, strides=strides, memory="host", offset=offset)


def program(rows: int) -> Program:
    values = (
        value((rows, WIDTH), (WIDTH, 1)), value((rows, WIDTH), (WIDTH, 1)), value((WIDTH,), (1,)),
        value((WIDTH, WIDTH), (WIDTH, 1)), value((rows, 4), (WIDTH, 1)), value((rows, WIDTH), (WIDTH, 1)),
        value((rows, WIDTH - 1), (WIDTH, 1), 4),
    )  # fmt: skip
    step = Step(kind="host", region=0, file="", inputs=(0,), outputs=tuple(range(1, 7)))
    return Program(key=(rows,), values=values, inputs=(0,), outputs=tuple(range(1, 7)), steps=(step,), arena=0, static=0)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sessions") / "cell.cgb"
    (folder / "host").mkdir(parents=True)
    model, rows = Cell().eval(), torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(model, (example(3),), dynamic_shapes=({0: rows},))
    compiled = compile_cpu(exported, tmp_path_factory.mktemp("work"), lambda text: None)
    os.rename(compiled.path, folder / FILE)
    region = HostRegion((folder / FILE).read_bytes(), libtorch.load(torch.__version__), FILE)
    weights = [
        Weight(name="memory", tensor="memory", dtype="float32", shape=(WIDTH,), strides=(1,), memory="state", offset=0),
        Weight(name="steps", tensor="steps", dtype="int64", shape=(4,), strides=(1,), memory="state", offset=256),
        Weight(name="random", tensor="random", dtype="int64", shape=(2,), strides=(1,), memory="state", offset=512),
        Weight(
            name="weight", tensor="weight", dtype="float32", shape=(WIDTH, WIDTH), strides=(WIDTH, 1), memory="weights", offset=0
        ),
    ]
    names = [weight.name for weight in weights]
    constants = tuple([(symbol, names.index(name)) for symbol, name in region.constants()])
    region.close()
    assert sorted(weights[index].name for _, index in constants) == ["memory", "steps", "weight"]
    tensors = {name: stored(tensor) for name, tensor in model.state_dict().items()} | {"random": stored(torch.zeros(2).long())}
    for name, held in ((file_names.WEIGHTS, tensors), (file_names.SELF_TEST, {})):
        with open(folder / name, "wb") as file:
            safetensors_files.write(file, held)
    (folder / file_names.PROGRAM).write_bytes(b"PK, but not really\n")
    base = tiny_bundle.manifest()

    def spec(name: str, *shape: Any) -> TensorSpec:
        return TensorSpec(name=name, dtype="float32", shape=shape, order=tuple(range(len(shape))))

    examined = (*["float32"] * len(OUTPUTS), "float32", "int64", "int64")
    shapes: list[tuple[Any, ...]] = [("rows", WIDTH), (WIDTH,), (WIDTH, WIDTH), ("rows", 4), ("rows", WIDTH), ("rows", WIDTH - 1)]
    tiny_bundle.finish(
        folder,
        edited(
            base,
            target=Target(
                kind="cpu",
                arch=os.uname().machine,
                level="",
                features=compiled.features,
                torch=torch.__version__.split("+")[0],
                driver=0,
            ),
            dimensions=(replace(base.entries[0].dimensions[0], name="rows", sizes=SIZES, pad="no", chunk=False),),
            inputs=(spec("x", "rows", WIDTH),),
            outputs=tuple([spec(name, *shape) for name, shape in zip(OUTPUTS, shapes, strict=True)]),
            aliases=(
                Alias(output=1, memory="state", index=0),
                Alias(output=2, memory="weights", index=3),
                Alias(output=3, memory="outputs", index=0),
                Alias(output=4, memory="inputs", index=0),
                Alias(output=5, memory="inputs", index=0),
            ),
            random=2,
            result={"dict": [[name, {"tensor": place}] for place, name in enumerate(OUTPUTS)]},
            weights=tuple(weights),
            memories=(("weights", 4 * WIDTH * WIDTH), ("state", 528)),
            regions=(Region(name="cell", kind="host", reason="the cpu target has no graphs", file=FILE, constants=constants),),
            programs=tuple(map(program, SIZES)),
            self_test=replace(
                base.entries[0].self_test,
                bounds=tiny_bundle.bounds(*examined),
                proofs=tuple([tiny_bundle.proof(size) for size in SIZES]),
            ),
        ),
    )
    return folder


@pytest.fixture
def cell(bundle: Path) -> Iterator[cgbundle.Program]:
    with cgbundle.load(bundle) as program:
        yield program


def check_equal(got: Any, want: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(got), want, rtol=1e-5, atol=1e-5)


def state_of(program: cgbundle.Program) -> list[torch.Tensor]:
    return [torch.from_dlpack(program.state[name]) for name in ("memory", "steps")]


def test_state_goes_from_call_to_call_and_key_to_key_as_in_eager(cell: cgbundle.Program) -> None:
    model = Cell()
    with torch.no_grad():
        for number, rows in enumerate((2, 5, 5, 2, 5)):
            x = example(rows, number)
            check_equal(cell(x)["made"], model(x)[0])
            for got, want in zip(state_of(cell), (model.memory, model.steps), strict=True):
                check_equal(got, want)
    cell.reset()
    fresh = Cell()
    for got, want in zip(state_of(cell), (fresh.memory, fresh.steps), strict=True):
        assert torch.equal(got, want)
    cell.state["memory"] = numpy.zeros(WIDTH, "float32")
    cell.state["steps"] = torch.tensor([1, 2, 3, 4])
    with torch.no_grad():
        fresh.memory.zero_()
        check_equal(cell(example(2))["made"], fresh(example(2))[0])
    assert cell.state["steps"].tolist() == [2, 4, 6, 8]
    view = torch.from_dlpack(cell.state.view("steps"))
    view.zero_()
    cell(example(2))
    assert view.tolist() == [1, 2, 3, 4]


def sequence(seed: int) -> list[torch.Tensor]:
    return [example(SIZES[(seed + number) % 2], 1000 * seed + number) for number in range(SPIN)]


def run(program: cgbundle.Program, calls: list[torch.Tensor]) -> list[torch.Tensor]:
    return [program(x)["made"] for x in calls]


def test_eight_sessions_in_eight_threads_equal_one_after_the_other_bit_for_bit(cell: cgbundle.Program) -> None:
    wanted = []
    for seed in range(8):
        cell.reset()
        wanted.append((run(cell, sequence(seed)), state_of(cell)))
    cell.reset()
    outcomes: dict[int, Any] = {}
    ready = threading.Barrier(8)

    def work(seed: int, session: cgbundle.Program) -> None:
        calls = sequence(seed)
        ready.wait(30)
        outcomes[seed] = (run(session, calls), state_of(session))

    sessions = [cell.session() for _ in range(8)]
    threads = [threading.Thread(target=work, args=(seed, session)) for seed, session in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for seed, (outputs, state) in enumerate(wanted):
        assert all(torch.equal(got, want) for got, want in zip(outcomes[seed][0], outputs, strict=True)), seed
        assert all(torch.equal(got, want) for got, want in zip(outcomes[seed][1], state, strict=True)), seed
    assert cell.state["steps"].tolist() == [10, 11, 12, 13], "the loaded program's is its own"


def test_threads_take_turns_in_the_loaded_program(cell: cgbundle.Program) -> None:
    threads = [threading.Thread(target=run, args=(cell, sequence(seed))) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert cell.state["steps"].tolist() == [first + step * 3 * SPIN for first, step in zip(range(10, 14), range(1, 5), strict=True)]


def test_two_threads_in_one_session_raise(cell: cgbundle.Program) -> None:
    session = cell.session()
    errors: list[BaseException] = []
    calls = 0

    def work() -> None:
        nonlocal calls
        for number in range(50 * SPIN):
            try:
                session(example(5, number % 7))
                calls += 1
            except SessionBusy as error:
                errors.append(error)
            if errors and calls > 10:
                return

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors and "a session of program 'tiny' is in use by " in str(errors[0])
    done = session.state["steps"].tolist()
    assert [(now - first) % step for now, first, step in zip(done, range(10, 14), range(1, 5), strict=True)] == [0] * 4
    assert len({(now - first) // step for now, first, step in zip(done, range(10, 14), range(1, 5), strict=True)}) == 1


def test_a_closed_program_closes_its_sessions_and_forgotten_ones_are_freed(bundle: Path) -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as file:
            return sum(str(bundle / file_names.WEIGHTS) in line for line in file)

    gc.collect()
    before = mapped()
    loaded = cgbundle.load(bundle)
    session = loaded.session()
    assert mapped() > before
    loaded.session()
    view = session.state.view("steps")
    loaded.close()
    for program in (loaded, session):
        uses: tuple[Callable[[], Any], ...] = (
            lambda closed=program: closed(example(2)), lambda closed=program: closed.state["steps"], program.reset, program.session,
            lambda owner=program: owner.buffers((2,)),
        )  # fmt: skip
        for use in uses:
            with raises("program-closed"):
                use()
    assert view.tolist() == [10, 11, 12, 13], "whoever looks at memory keeps it"
    del view, loaded, session, program, use, uses
    gc.collect()
    assert mapped() <= before


def test_threads_that_close_one_session_at_once_free_it_once(bundle: Path) -> None:
    """Closing the program closes its sessions too, while another thread closes one of them."""
    for _ in range(30):
        program = cgbundle.load(bundle)
        sessions = [program.session() for _ in range(4)]
        start = threading.Barrier(6)

        def end(instance: cgbundle.Program, start: threading.Barrier = start) -> None:
            start.wait(60)
            instance.close()

        threads = [threading.Thread(target=end, args=(instance,)) for instance in (*sessions, program, program)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def test_the_memory_of_a_session_is_its_state(cell: cgbundle.Program) -> None:
    assert cell.session_memory == {"state": 528} == cell.session().session_memory


def test_seeds_are_written_and_differ_between_sessions(cell: cgbundle.Program) -> None:
    session = cell.session()
    drawn = [numpy.frombuffer(program.state_bytes(2), "int64").tolist() for program in (cell, session)]
    assert drawn[0][0] != drawn[1][0] and [calls for _, calls in drawn] == [0, 0]
    cell.seed(77)
    cell.reset()
    assert numpy.frombuffer(cell.state_bytes(2), "int64").tolist() == [77, 0]
    assert list(cell.state) == ["memory", "steps"]


def test_the_static_buffers_are_the_same_at_every_call_and_not_copied(cell: cgbundle.Program) -> None:
    session = cell.session()
    (x,) = session.buffers((5,))
    (again,), (other,) = session.buffers((5,)), cell.buffers((5,))
    assert x.address == again.address != other.address and x.address % 64 == 0
    torch.from_dlpack(x).copy_(example(5))
    outputs = session(torch.from_dlpack(x))
    assert outputs["same"].data_ptr() == x.address
    with torch.no_grad():
        check_equal(outputs["made"], Cell()(example(5))[0])
    with raises("key-missing", match=r"expected a recorded int_key \(\(2,\), \(5,\)\), got \(3,\)"):
        session.buffers((3,))


@pytest.mark.parametrize("outputs", ["copy", "view"])
@pytest.mark.parametrize("kind", ["torch", "numpy", "plain"])
def test_outputs_share_memory_as_in_eager(bundle: Path, kind: str, outputs: str) -> None:
    kinds: dict[str, Callable[[torch.Tensor], Any]] = {
        "torch": lambda x: x, "numpy": lambda x: x.numpy(), "plain": lambda x: from_bytes(x.numpy().tobytes(), "float32", x.shape)
    }  # fmt: skip
    with cgbundle.load(bundle, outputs=outputs) as cell, cell.session() as session:
        x = kinds[kind](example(2))
        reply = session(x)
        assert reply["same"] is x
        live = torch.from_dlpack(reply["memory"])
        first, whole, rest = (torch.from_dlpack(getattr(reply[name], "tensor", reply[name])) for name in ("first", "made", "rest"))
        assert first.data_ptr() == whole.data_ptr() and torch.equal(first, whole[:, :4])
        assert rest.data_ptr() == torch.from_dlpack(x).data_ptr() + 4
        assert torch.equal(live, torch.from_dlpack(session.state["memory"]))
        session(kinds[kind](example(5, 1)))
        assert torch.equal(live, torch.from_dlpack(session.state["memory"])), "it is the state itself"
        weight = torch.from_dlpack(reply["weight"])
        weight[0, 0] = 5.0
        assert torch.from_dlpack(cell(x)["weight"])[0, 0] == 5.0, "sessions share their weights"
    with cgbundle.load(bundle) as fresh:
        assert torch.equal(fresh(example(2))["weight"], Cell().weight), "the file is not written to"
