"""Models are built by cgcompile, loaded by cgbundle and called on a GPU."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.raising import raises

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
from cgbundle import self_test  # noqa: E402
from cgbundle.cuda import driver  # noqa: E402
from cgbundle.tensors.tensor import from_bytes  # noqa: E402
from tests.gpu.helpers import built  # noqa: E402
from tests.gpu.helpers.built import Case  # noqa: E402

NAMES = ("gpt", "mlp")


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


@pytest.fixture
def program(case: Case) -> Iterator[Any]:
    with cgbundle.load(case.path) as loaded:
        yield loaded


# --- calls -------------------------------------------------------------------------------------------------------


def test_the_self_test_has_the_recorded_bits_in_a_process_without_torch(case: Case) -> None:
    answer = self_test.fresh(str(case.path))
    assert [row["exact"] for row in answer["results"]] == [True] * len(built.SIZES) and not answer["torch_imported"]


@pytest.mark.parametrize("size", built.SIZES)
def test_a_recorded_size_equals_eager(case: Case, program: Any, size: int) -> None:
    value = case.draw(size)
    got = program(value)
    case.check(got, value)
    assert got.is_cuda and got.is_contiguous() and torch.equal(got, program(value))


@pytest.mark.parametrize("size", [2, 3, 5, 9])
def test_other_sizes_are_padded_and_cut(case: Case, program: Any, size: int) -> None:
    value = case.draw(size)
    case.check(program(value), value)
    with cgbundle.load(case.path, on_miss="chunk") as chunk:
        case.check(chunk(value), value)
        case.check(chunk(value.cpu()), value)


def test_a_size_that_was_not_recorded_can_be_refused(case: Case) -> None:
    with cgbundle.load(case.path, on_miss="error") as program, raises("key-missing", match="1, 4"):
        program(case.draw(3))


def test_the_callers_stream_is_honoured(case: Case, program: Any) -> None:
    sources = [case.draw(4, seed) for seed in range(4)]
    expected = [program(source) for source in sources]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for source, want in zip(sources * 5, expected * 5, strict=True):
        with torch.cuda.stream(side):
            value = torch.empty_like(source)
            torch.cuda._sleep(2_000_000)  # the GPU writes the input after the call below has returned
            value.copy_(source)
            got = program(value)
            value.zero_()  # and overwrites it after the call's work
        side.synchronize()
        assert torch.equal(got, want)


def test_streams_in_turn_do_not_disturb_each_other(case: Case, program: Any) -> None:
    draw = random.Random(3)
    values = {size: [case.draw(size, seed) for seed in range(3)] for size in built.SIZES}
    expected = {size: [program(value) for value in inputs] for size, inputs in values.items()}
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    pairs = []
    for _ in range(200):
        size, index = draw.choice(built.SIZES), draw.randrange(3)
        with torch.cuda.stream(draw.choice(streams)):
            pairs.append((program(values[size][index]), expected[size][index]))
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got, want in pairs)


def test_a_lazy_program_and_its_sessions_run_what_they_were_loaded_with(cases: dict[str, Case], tmp_path: Path) -> None:
    """Before any graph is built, a bundle with other tables, kernels and weights replaces the bundle at this path."""
    case, path = cases["gpt"], tmp_path / "model.cgb"
    shutil.copytree(case.path, path)
    with cgbundle.load(path, lazy=True) as program:
        path.rename(tmp_path / "old")
        shutil.copytree(cases["mlp"].path, path)
        shutil.rmtree(tmp_path / "old")
        for size in built.SIZES:
            value = case.draw(size)
            case.check(program(value), value)
            with program.session() as session:
                case.check(session(value), value)
    with cgbundle.load(path) as program:
        value = cases["mlp"].draw(4)
        cases["mlp"].check(program(value), value)


def test_weights_may_be_copied_before_they_are_checked(cases: dict[str, Case]) -> None:
    case = cases["gpt"]
    value = case.draw(4)
    with cgbundle.load(case.path, weights="copy", check="full") as program:
        case.check(program(value), value)


def test_every_kind_of_tensor_gives_the_same_numbers(cases: dict[str, Case]) -> None:
    case = cases["mlp"]
    value = case.draw(4)
    with cgbundle.load(case.path) as program:
        want = program(value).cpu()
        numpy = program(value.cpu().numpy())
        plain = program(from_bytes(value.cpu().numpy().tobytes(), "float32", value.shape))
        assert torch.equal(program(value.cpu()), want) and not program(value.cpu()).is_cuda
        assert type(numpy).__name__ == "ndarray" and torch.equal(torch.from_numpy(numpy), want)
        assert isinstance(plain, cgbundle.Tensor) and plain.tobytes() == want.numpy().tobytes()
        assert torch.equal(program(value.t().contiguous().t()), want.cuda()), "another layout of the input"


def test_cupy_arrays(cases: dict[str, Case]) -> None:
    cupy = pytest.importorskip("cupy")
    case = cases["mlp"]
    value = case.draw(4)
    with cgbundle.load(case.path) as program:
        want = program(value)
        got = program(cupy.asarray(value))
        assert isinstance(got, cupy.ndarray) and torch.equal(torch.as_tensor(got, device="cuda"), want)
        with cupy.cuda.Stream(non_blocking=True):
            again = program(cupy.asarray(value))
            cupy.cuda.get_current_stream().synchronize()
        assert torch.equal(torch.as_tensor(again, device="cuda"), want)
        case.check(torch.as_tensor(program(cupy.asarray(case.draw(3))), device="cuda"), case.draw(3))


def test_views_become_stale(case: Case) -> None:
    with cgbundle.load(case.path, outputs="view") as program:
        value = case.draw(4)
        view = program(value)
        kept = view.clone()
        case.check(view.tensor, value)
        program(case.draw(4, 1))
        with raises("stale-view", match="call 1 was read after call 2"):
            _ = view.tensor
        with raises("stale-view"):
            torch.from_dlpack(view)
        case.check(kept, value)


def test_stream_mode_gives_the_bits_of_graph_mode(case: Case, program: Any) -> None:
    with cgbundle.load(case.path, mode="stream") as stream:
        for size in (*built.SIZES, 3, 9):
            value = case.draw(size)
            assert torch.equal(stream(value), program(value))


def test_wrong_calls_name_the_input(cases: dict[str, Case]) -> None:
    with cgbundle.load(cases["mlp"].path) as program, raises("input-shape", match="input"):
        program(torch.zeros(4, built.WIDTH + 1, device="cuda"))


# --- concurrent calls, and close ----------------------------------------------------------------------------------


def test_threads_share_a_program(case: Case, program: Any) -> None:
    values = {size: [case.draw(size, seed) for seed in range(3)] for size in (*built.SIZES, 3)}
    expected = {size: [program(value) for value in inputs] for size, inputs in values.items()}
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(60):
                size, index = draw.choice(list(values)), draw.randrange(3)
                if not torch.equal(program(values[size][index]), expected[size][index]):
                    wrong.append(f"thread {number}: size {size}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_bundles_and_two_programs_of_one_bundle(cases: dict[str, Case]) -> None:
    gpt, mlp = cases["gpt"], cases["mlp"]
    with cgbundle.load(gpt.path) as one, cgbundle.load(mlp.path) as two, cgbundle.load(gpt.path, outputs="view") as three:
        ids, floats = gpt.draw(4), mlp.draw(1)
        first = one(ids)
        for _ in range(20):
            kept = three(ids)
            mlp.check(two(floats), floats)
            assert torch.equal(one(ids), first) and torch.equal(kept.tensor, first)


@pytest.mark.alone
def test_close_gives_every_byte_back(case: Case) -> None:
    context = driver.Context(0)
    free = []
    for round_ in range(20):
        program = cgbundle.load(case.path, mode=("graph", "stream")[round_ % 2])
        value = case.draw(4)
        kept = program(value)
        program.close()
        program.close()
        case.check(kept, value)
        with raises("program-closed"):
            program(value)
        torch.cuda.synchronize()
        with context:
            free.append(driver.free_bytes())
    context.release()
    assert len(set(free[10:])) == 1, free


def test_all_sizes_share_the_largest_ones_arena(case: Case, program: Any) -> None:
    arenas = [entry.arena for entry in program.manifest.entries[0].programs]
    assert program.memory["arena"] == max(arenas) and program.int_keys == ((1,), (4,))
