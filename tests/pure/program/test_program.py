"""A program over a fake backend: exact, padded and chunked calls, layouts, nested arguments, views, threads and closing."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import pytest

from cgbundle.errors import CallError
from cgbundle.format.schema import Manifest, Parameter
from cgbundle.program import Program
from cgbundle.tensors import tensor
from cgbundle.tensors.tensor import Tensor
from tests.helpers.bundles.fabricate import Compute, FakeBackend, Numbers, dimension, signature, spec
from tests.helpers.raising import raises

LINE = signature([dimension("batch", 2, 8)], [spec("x", "batch", 3)], [spec("y", "batch", 3)])
GRID = signature(
    [dimension("batch", 1, 4), dimension("seq", 2, 8)],
    [spec("x", "batch", "seq"), spec("bias")],
    [spec("y", "seq", "batch"), spec("sum", "batch", "seq", dtype="int64")],
    result={"dict": [["y", {"tensor": 0}], ["more", {"list": [{"tensor": 1}, {"value": None}]}]]},
)


def double(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
    return [[2 * number for number in inputs[0]]]


def turn_and_add(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
    """Computes y[s, b] = x[b, s] + bias, and as an int sum[b, s] = x[b, s]."""
    (batch, seq), (x, (bias,)) = key, inputs
    return [[x[b * seq + s] + bias for s in range(seq) for b in range(batch)], [int(number) for number in x]]


def program(
    manifest: Manifest, compute: Compute, on_miss: str = "pad", outputs: str = "copy", *, static: bool = False, cast: bool = False
) -> tuple[Program, FakeBackend]:
    backend = FakeBackend(manifest, compute, static=static)
    return Program(manifest, backend, on_miss, outputs, cast), backend


def numbers(shape: Sequence[int], dtype: str = "float32", first: int = 1) -> Tensor:
    kinds = {"float32": ctypes.c_float, "int64": ctypes.c_int64}
    count = prod(shape)
    return tensor.from_bytes((kinds[dtype] * count)(*range(first, first + count)), dtype, shape)


def rows(first: int, last: int) -> list[list[float]]:
    """Returns rows of `double` for the numbers of a call."""
    return [[2.0 * (3 * row + column + 1) for column in range(3)] for row in range(first, last)]


# --- exact, padded, cut ----------------------------------------------------------------------------------------------


def test_a_recorded_size_is_replayed_once_as_it_is() -> None:
    run, backend = program(LINE, double)
    (y,) = run(numbers((2, 3)))
    assert isinstance(y, Tensor) and y.tolist() == rows(0, 2)
    assert backend.calls == [((2,), [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])]


def test_a_result_outlives_the_program_and_the_next_calls() -> None:
    run, _ = program(LINE, double)
    (y,) = run(numbers((2, 3)))
    run(numbers((2, 3), first=50))
    run.close()
    del run
    gc.collect()
    assert y.tolist() == rows(0, 2)


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_a_size_in_between_is_filled_up_with_zeros(size: int) -> None:
    run, backend = program(LINE, double)
    (y,) = run(numbers((size, 3)))
    assert y.tolist() == rows(0, size) and y.contiguous
    ((key, (padded,)),) = backend.calls
    assert key == ((2,) if size < 2 else (8,))
    assert padded == [float(number) for number in range(1, 3 * size + 1)] + [0.0] * (3 * (key[0] - size))


@pytest.mark.parametrize(("size", "keys"), [(9, [8, 2]), (13, [8, 8]), (16, [8, 8]), (41, [8] * 5 + [2])])
def test_a_larger_size_is_cut(size: int, keys: list[int]) -> None:
    run, backend = program(LINE, double)
    (y,) = run(numbers((size, 3)))
    assert y.tolist() == rows(0, size)
    assert [key for key, _ in backend.calls] == [(key,) for key in keys]


def test_chunk_takes_the_pieces_that_waste_the_least() -> None:
    run, backend = program(LINE, double, "chunk")
    (y,) = run(numbers((5, 3)))
    assert y.tolist() == rows(0, 5)
    assert [key for key, _ in backend.calls] == [(2,), (2,), (2,)]


def test_error_refuses_before_anything_runs() -> None:
    run, backend = program(LINE, double, "error")
    with raises("key-missing", match="batch"):
        run(numbers((5, 3)))
    assert backend.calls == []


@pytest.mark.parametrize(("batch", "seq"), [(1, 2), (4, 8), (3, 5), (6, 8), (4, 20), (9, 19)])
@pytest.mark.parametrize("on_miss", ["pad", "chunk"])
@pytest.mark.parametrize("library", ["plain", "numpy", "torch"])
def test_two_dimensions_are_filled_up_and_cut_together(library: str, on_miss: str, batch: int, seq: int) -> None:
    run, _ = program(GRID, turn_and_add, on_miss)
    x, bias = numbers((batch, seq)), numbers((), first=100)
    outputs = run(convert(x, library), convert(bias, library))
    assert list(outputs) == ["y", "more"] and outputs["more"][1] is None
    y, total = outputs["y"], outputs["more"][0]
    assert kind_of(y) == kind_of(total) == library
    assert y.tolist() == [[b * seq + s + 1 + 100.0 for b in range(batch)] for s in range(seq)]
    assert total.tolist() == [[b * seq + s + 1 for s in range(seq)] for b in range(batch)]


def convert(value: Tensor, library: str) -> Any:
    if library == "plain":
        return value
    module = pytest.importorskip(library)
    return module.asarray(value.tolist(), dtype=getattr(module, value.dtype))


def kind_of(value: Any) -> str:
    return "plain" if isinstance(value, Tensor) else type(value).__module__.partition(".")[0]


def test_a_0_d_array_of_numpy_survives_a_padded_call_and_comes_back_as_an_array() -> None:
    """Indexing a 0-d array gives a number whose memory is freed at once."""
    numpy = pytest.importorskip("numpy")
    model = signature([dimension("batch", 4)], [spec("x", "batch"), spec("scale")], [spec("total"), spec("y", "batch")])
    seen: list[Numbers] = []

    def compute(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
        seen.append(inputs[1])
        return [[sum(inputs[0]) * inputs[1][0]], inputs[0]]

    run, _ = program(model, compute)
    for number in range(20):
        total, _ = run(numpy.ones(3, "float32"), numpy.array(number, "float32"))
        assert type(total) is numpy.ndarray and total.shape == () and total == 3 * number
    assert seen == [[float(number)] for number in range(20)]


def test_an_input_without_the_dimension_goes_whole_into_every_piece() -> None:
    model = signature([dimension("batch", 2)], [spec("x", "batch"), spec("table", 3)], [spec("y", "batch")])
    run, backend = program(model, lambda key, inputs: [[number + sum(inputs[1]) for number in inputs[0]]])
    (y,) = run(numbers((5,)), numbers((3,)))
    assert y.tolist() == [number + 6.0 for number in range(1, 6)]
    assert [inputs[1] for _, inputs in backend.calls] == [[1.0, 2.0, 3.0]] * 3


def test_a_model_without_dimensions_or_inputs_runs() -> None:
    run, _ = program(signature([], [], [spec("y", 2)]), lambda key, inputs: [[1.0, 2.0]])
    (y,) = run()
    assert y.tolist() == [1.0, 2.0]
    run, _ = program(signature([], [spec("x", 0, 3)], [spec("y", 0, 3)]), double)
    (y,) = run(numbers((0, 3)))
    assert y.tolist() == [] and y.shape == (0, 3)


# --- layouts ---------------------------------------------------------------------------------------------------------

LAST = signature(
    [dimension("batch", 1, 4)],
    [spec("x", "batch", 2, 3, order=(0, 2, 1))],
    [spec("y", "batch", 2, 3)],
    output_orders=[(0, 2, 1)],
)


@pytest.mark.parametrize("library", ["plain", "numpy", "torch"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 3, 6])
def test_channels_last_in_and_row_major_out(library: str, turned: bool, batch: int) -> None:
    run, _ = program(LAST, double)
    x = convert(numbers((batch, 2, 3)), library)
    if turned:
        if library == "plain":
            x = numbers((batch, 3, 2))
            x = Tensor(x.address, x.dtype, (batch, 2, 3), (6, 1, 2), x)
        else:
            x = convert(numbers((batch, 3, 2)), library).transpose(*((0, 2, 1) if library == "numpy" else (1, 2)))
    (y,) = run(x)
    assert y.tolist() == [[[2 * number for number in row] for row in block] for block in x.tolist()]
    if library == "torch":
        assert y.is_contiguous()
    elif library == "numpy":
        assert y.flags.c_contiguous
    else:
        assert y.contiguous


def test_an_array_that_is_laid_out_right_is_not_copied() -> None:
    numpy = pytest.importorskip("numpy")
    seen: list[int] = []

    class Watching(FakeBackend):
        def run(self, program: int, addresses: Sequence[int], device: int | None, stream: object) -> Any:
            seen.extend(addresses)
            return super().run(program, addresses, device, stream)

    run = Program(LAST, Watching(LAST, double), "pad", "copy")
    x = numpy.zeros((4, 3, 2), "float32").transpose(0, 2, 1)
    run(x)
    assert seen == [x.__array_interface__["data"][0]]


def test_strided_reversed_and_readonly_arrays_are_laid_out_anew() -> None:
    numpy = pytest.importorskip("numpy")
    base = numpy.arange(48, dtype="float32").reshape(8, 6)
    base.flags.writeable = False
    run, _ = program(LINE, double)
    for x in (base[:, ::2], base[::-1, :3], base[:2, 3:], base[5:, :3], numpy.asfortranarray(base[:, :3])):
        (y,) = run(x)
        assert y.tolist() == (2 * x).tolist()


# --- structure and refusals ------------------------------------------------------------------------------------------


def test_inputs_go_by_name_and_nested() -> None:
    model = signature(
        [],
        [spec("a", 1), spec("b", 1)],
        [spec("y", 1)],
        call={"call": [["pair", {"dict": [["a", {"tensor": 0}], ["b", {"tensor": 1}]]}], ["flag", {"value": True}]]},
        parameters=(Parameter(), Parameter(default={"value": True})),
        result={"namedtuple": ["Output", ["y", "loss"], [{"tensor": 0}, {"value": None}]]},
    )
    run, _ = program(model, lambda key, inputs: [[inputs[0][0] - inputs[1][0]]])
    outputs = run(pair={"b": numbers((1,), first=1), "a": numbers((1,), first=5)})
    assert outputs.y.tolist() == [4.0] and outputs.loss is None
    assert run({"a": numbers((1,)), "b": numbers((1,))}, True).y.tolist() == [0.0]
    with raises("input-structure", match="input 'flag': the bundle was built for the constant True, got False"):
        run({"a": numbers((1,)), "b": numbers((1,))}, flag=False)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((), "input-structure", ["'x'", "missing"]),
        ((numbers((2, 3)), numbers((2, 3))), "input-structure", ["got 2"]),
        (([[1.0, 2.0, 3.0]] * 2,), "input-kind", ["'x'", "got a list of 2", "float32 [batch, 3]"]),
        (((numbers((2, 3)),),), "input-kind", ["'x'", "got a tuple of 1", "float32 [batch, 3]"]),
        ((2.5,), "input-kind", ["'x'", "got the float 2.5", "float32 [batch, 3]"]),
        ((None,), "input-kind", ["'x'", "got None", "float32 [batch, 3]"]),
        ((numbers((2, 3), "int64"),), "input-dtype", ["'x'", "float32", "int64"]),
        ((numbers((2,)),), "input-shape", ["'x'", "expected 2 axes", "got 1"]),
        ((numbers((2, 4)),), "input-shape", ["'x'", "axis 1", "expected 3", "got 4"]),
        ((numbers((0, 3)),), "key-missing", ["batch=0"]),
        ((Tensor(0, "float32", (2, 3), None, None, device=0),), "input-device", ["'x'", "CPU", "device 0"]),
    ],
)
def test_a_call_that_does_not_fit_is_refused_in_one_line(
    arguments: tuple[Any, ...], kind: type[CallError], words: list[str]
) -> None:
    run, backend = program(LINE, double)
    with raises(kind) as caught:
        run(*arguments)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and caught.value.exit_code == 2
    assert backend.calls == []
    run(numbers((2, 3)))
    run.close()  # close does not wait: the refused call has ended


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ((numbers((2, 3)),), "every input is an argument of its own: program(*inputs)"),
        ({"x": numbers((2, 3))}, "every input is an argument of its own: program(**inputs)"),
        ([[1.0, 2.0, 3.0]], "make a tensor of it: numpy.asarray(value, dtype='float32')"),
        (3, "make a tensor of it: numpy.asarray(value, dtype='float32')"),
    ],
)
def test_what_is_no_tensor_is_answered_with_how_to_pass_one(argument: Any, hint: str) -> None:
    with raises("input-kind") as caught:
        program(LINE, double)[0](argument)
    assert caught.value.hint == hint


@pytest.mark.parametrize(("argument", "stars"), [((numbers((1, 2)), numbers(())), "*"), ({"x": numbers((1, 2)), "bias": 1}, "**")])
def test_inputs_in_one_tuple_or_dict_are_answered_with_how_to_unpack_them(argument: Any, stars: str) -> None:
    message = "input 'bias' is missing: the bundle takes x, bias, and was given a (tuple|dict)"
    with raises("input-structure", match=message) as caught:
        program(GRID, turn_and_add)[0](argument)
    assert caught.value.hint == f"every input is an argument of its own: program({stars}inputs)"


def test_dimensions_that_disagree_are_refused() -> None:
    run, _ = program(signature([dimension("n", 2)], [spec("a", "n"), spec("b", "n")], [spec("y", "n")]), double)
    with raises("dimension-disagrees", match="input 'b', axis 0: expected n=2 as in input 'a', axis 0, got 3"):
        run(numbers((2,)), numbers((3,)))


def test_replay_takes_as_many_tensors_as_there_are_inputs() -> None:
    run, _ = program(LINE, double)
    for tensors in ([], [numbers((2, 3))] * 2):
        with raises("input-structure", match=f"expected 1 inputs, got {len(tensors)}"):
            run.replay(tensors)


def test_numpy_inputs_of_two_libraries_are_refused() -> None:
    numpy = pytest.importorskip("numpy")
    run, _ = program(GRID, turn_and_add)
    with raises("input-kind", match="input 'bias': expected a NumPy array like the first input, got "):
        run(numpy.zeros((1, 2), "float32"), numbers(()))


def test_an_error_of_the_backend_comes_through_and_the_program_goes_on() -> None:
    def fail(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
        if inputs[0][0] == 1.0:
            raise ZeroDivisionError
        return double(key, inputs)

    run, _ = program(LINE, fail)
    with pytest.raises(ZeroDivisionError):
        run(numbers((2, 3)))
    (y,) = run(numbers((2, 3), first=2))
    assert y.tolist()[0][0] == 4.0
    run.close()


# --- views -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["plain", "numpy", "torch"])
@pytest.mark.parametrize("size", [2, 5, 20])
@pytest.mark.parametrize("static", [False, True])
def test_a_view_is_read_until_the_next_call_and_not_after(library: str, size: int, static: bool) -> None:
    run, _ = program(LINE, double, outputs="view", static=static)
    (view,) = run(convert(numbers((size, 3)), library))
    assert (view.name, view.dtype, view.shape, view.call, len(view)) == ("y", "float32", (size, 3), 1, size)
    assert kind_of(view.tensor) == library and view.tensor.tolist() == rows(0, size)
    kept = view.clone()
    assert kind_of(kept) == library
    (second,) = run(convert(numbers((2, 3), first=7), library))
    with raises("stale-view", match="^output 'y' of call 1 was read after call 2$") as caught:
        _ = view.tensor
    assert "clone" in caught.value.hint
    for use in (view.clone, view.__array__, view.__dlpack__, view.__dlpack_device__, lambda: view[0]):
        with raises("stale-view"):
            use()
    assert (view.shape, view.dtype) == ((size, 3), "float32") and "call 1" in repr(view)
    assert kept.tolist() == rows(0, size)
    assert second.tensor.tolist() == rows(2, 4)


def test_a_refused_call_makes_no_view_stale() -> None:
    run, _ = program(LINE, double, outputs="view")
    (view,) = run(numbers((2, 3)))
    with raises("input-dtype"):
        run(numbers((2, 3), "int64"))
    with raises("input-shape"):
        run(numbers((2, 4)))
    assert view.tensor.tolist() == rows(0, 2)


def test_a_view_is_stale_when_another_threads_replay_came_after_its_own() -> None:
    """When this call made its views, the call of the other thread was already waiting for its turn."""
    first_runs, second_waits = threading.Event(), threading.Event()

    def compute(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
        if inputs[0][0] == 1.0:
            first_runs.set()
            assert second_waits.wait(60)
        return double(key, inputs)

    run, backend = program(LINE, compute, outputs="view", static=True)
    views: dict[str, Any] = {}
    lock = backend.running.inner

    class Announced:
        @property
        def turn(self) -> Announced:
            return self

        def __enter__(self) -> None:
            if not lock.acquire(blocking=False):
                second_waits.set()
                lock.acquire()

        def __exit__(self, *unused: object) -> None:
            lock.release()

        close = backend.running.close

    backend.running = Announced()
    one = threading.Thread(target=lambda: views.update(one=run(numbers((2, 3)))[0]))
    two = threading.Thread(target=lambda: views.update(two=run(numbers((2, 3), first=7))[0]))
    one.start()
    assert first_runs.wait(60)
    two.start()
    one.join(60)
    two.join(60)
    with raises("stale-view"):
        _ = views["one"].tensor
    assert views["two"].tensor.tolist() == rows(2, 4)


def test_a_copy_of_a_view_for_numpy_is_a_copy_when_asked_for() -> None:
    numpy = pytest.importorskip("numpy")
    run, _ = program(LINE, double, outputs="view", static=True)
    for library in ("plain", "numpy", "torch"):
        (view,) = run(convert(numbers((2, 3)), library))
        shared, copied = numpy.asarray(view), numpy.array(view)
        assert shared.tolist() == copied.tolist() == rows(0, 2)
        assert numpy.asarray(view, dtype="float64").dtype == "float64"
        run(convert(numbers((2, 3), first=7), library))
        assert copied.tolist() == rows(0, 2), library


def test_a_view_speaks_dlpack() -> None:
    numpy = pytest.importorskip("numpy")
    run, _ = program(LINE, double, outputs="view")
    (view,) = run(numbers((2, 3)))
    assert numpy.from_dlpack(view).tolist() == rows(0, 2)


def test_a_view_without_axes_has_no_length() -> None:
    run, _ = program(signature([], [spec("x")], [spec("y")]), double, outputs="view")
    (view,) = run(numbers(()))
    assert view.tensor.tolist() == 2.0
    with pytest.raises(TypeError):
        len(view)


# --- threads and closing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True])
def test_eight_threads_get_their_own_results(static: bool) -> None:
    run, _ = program(LINE, double, static=static)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for round_ in range(20):
            size = 1 + (seed + round_) % 11
            (y,) = run(numbers((size, 3), first=seed))
            expected = [[2.0 * (seed + 3 * row + column) for column in range(3)] for row in range(size)]
            if y.tolist() != expected:
                wrong.append((seed, round_))

    threads = [threading.Thread(target=work, args=(100 * seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)


def test_close_waits_for_the_running_call_and_refuses_new_ones() -> None:
    running, go_on = threading.Event(), threading.Event()

    def compute(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
        running.set()
        assert go_on.wait(60)
        return double(key, inputs)

    run, backend = program(LINE, compute)
    returned: list[Any] = []
    caller = threading.Thread(target=lambda: returned.append(run(numbers((2, 3)))))
    caller.start()
    assert running.wait(60)
    closers = [threading.Thread(target=run.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    closers[0].join(0.05)
    assert closers[0].is_alive() and backend.closed == 0
    with raises("program-closed", match="program 'tiny' was closed"):
        run(numbers((2, 3)))
    go_on.set()
    for thread in (caller, *closers):
        thread.join(60)
        assert not thread.is_alive()
    assert returned[0][0].tolist() == rows(0, 2) and backend.closed == 1


def test_a_view_that_a_running_call_gives_while_the_program_is_closed_is_stale() -> None:
    """On a GPU the view's memory is freed as soon as the call ends."""
    running, go_on = threading.Event(), threading.Event()

    def compute(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
        running.set()
        assert go_on.wait(60)
        return double(key, inputs)

    run, backend = program(LINE, compute, outputs="view", static=True)
    backend.device = 0
    views: list[Any] = []
    caller = threading.Thread(target=lambda: views.append(run(numbers((2, 3)))))
    caller.start()
    assert running.wait(60)
    closer = threading.Thread(target=run.close)
    closer.start()
    closer.join(0.05)
    go_on.set()
    for thread in (caller, closer):
        thread.join(60)
    ((view,),) = views
    with raises("stale-view", match="was read after the program was closed"):
        _ = view.tensor


def test_a_closed_program_refuses_calls_and_closes_once() -> None:
    run, backend = program(LINE, double)
    with run as entered:
        assert entered is run
    run.close()
    assert backend.closed == 1
    with raises("program-closed", match="'tiny'") as caught:
        run(numbers((2, 3)))
    assert caught.value.exit_code == 2
    assert run.int_keys == ((2,), (8,)) and run.inputs == LINE.entries[0].inputs


def test_a_program_that_is_forgotten_is_closed() -> None:
    run, backend = program(LINE, double)
    alive = weakref.ref(run)
    run(numbers((2, 3)))
    del run
    gc.collect()
    assert alive() is None and backend.closed == 1


def test_plans_are_remembered_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from cgbundle.call import entry as module

    monkeypatch.setattr(module, "PLANS", 4)
    run, _ = program(LINE, double)
    for size in (*range(1, 20), *range(1, 20)):
        assert run(numbers((size, 3)))[0].tolist() == rows(0, size)
        assert len(run._plans) <= 4


def test_what_a_program_tells_of_itself() -> None:
    run, _ = program(GRID, turn_and_add)
    assert run.int_keys == ((1, 2), (1, 8), (4, 2), (4, 8))
    assert [output.name for output in run.outputs] == ["y", "sum"]
    assert run.memory == dict(GRID.memories)
    assert "tiny" in repr(run) and "(1, 2)" in repr(run)
