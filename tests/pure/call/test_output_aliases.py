"""Outputs that share memory with an input, state, a weight or another output: on both targets callers get the tensors that eager
PyTorch gives."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.call.aliasing import AliasLayout, rebase
from cgbundle.call.outputs import View
from cgbundle.catalogue import CATALOGUE
from cgbundle.format import manifest_json
from cgbundle.format.schema import Alias, Manifest, Value
from cgbundle.program import Program
from cgbundle.tensors.tensor import Tensor, from_bytes
from cgbundle.validate.state import check_alias_spans, check_aliases, check_state
from cgcompile.bundle import manifest_text
from tests.helpers.bundles import state_bundles
from tests.helpers.bundles.cuda_bundles import FLOATS, expected, inputs
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.fabricate import FakeBackend, Numbers, dimension, signature, spec
from tests.helpers.drivers.fake_driver import FakeDriver
from tests.helpers.raising import raises
from tests.pure.session.test_sessions import numbers, on_gpu, opened

numpy = pytest.importorskip("numpy")


# --- a GPU -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Manifest, Path]:
    return state_bundles.write(tmp_path / "tiny.cgb"), tmp_path / "tiny.cgb"


def sent(key: int, seed: int = 0) -> Tensor:
    return from_bytes(inputs(key, seed).tobytes(), "float32", (key, FLOATS))


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_tensors_of_the_gpu_share_what_they_share_in_eager(fake: FakeDriver, bundle: tuple[Manifest, Path], outputs: str) -> None:
    tables = set()
    with opened(bundle, outputs) as program, program.session() as session:
        for runner in (program, session):
            x = on_gpu(sent(4, 1))
            result = runner(x)
            assert result["same"] is x
            assert result["tail"].address == x.address + 16 and result["tail"].strides == (FLOATS, 1)
            live = result["total"]
            assert type(live) is Tensor and live.address == runner.state.view("total").address and live.device == 0
            tables.add(result["table"].address)
            y, head = result["y"], result["head"]
            assert isinstance(y, View) is isinstance(head, View) is (outputs == "view")
            y, head = (value.tensor if isinstance(value, View) else value for value in (y, head))
            assert head.address == y.address and (head.shape, head.strides) == ((4, 4), (FLOATS, 1))
            before = numbers(live)
            assert numbers(y) == list(expected(inputs(4, 1)))
            runner(on_gpu(sent(8, 2)))
            assert numbers(live) == [a + b for a, b in zip(before, inputs(8, 2)[:FLOATS], strict=True)], "the state itself"
            if outputs == "copy":
                assert numbers(y) == list(expected(inputs(4, 1)))
                ctypes.c_float.from_address(head.address).value = -5.0
                assert numbers(y)[0] == -5.0
            else:
                with raises("stale-view"):
                    _ = result["head"].tensor
    assert len(tables) == 1, "one weight for all sessions"


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_tensors_of_the_cpu_get_copies_of_what_lies_on_the_gpu(
    fake: FakeDriver, bundle: tuple[Manifest, Path], outputs: str
) -> None:
    with opened(bundle, outputs) as program:
        x = numpy.array(inputs(4, 3)).reshape(4, FLOATS)
        result = program(x)
        assert result["same"] is x
        assert numpy.shares_memory(result["tail"], x) and result["tail"].tolist() == x[:, 4:].tolist()
        total = numpy.asarray(result["total"]).copy()
        y, head = (numpy.asarray(result[name]) for name in ("y", "head"))
        assert y.ravel().tolist() == list(expected(inputs(4, 3)))
        head[0, 0] = -7
        assert y[0, 0] == -7
        assert numpy.asarray(result["table"]).tolist() == list(range(128))
        if outputs == "copy":
            program(x)
            assert result["total"].tolist() == total.tolist()


def test_parts_follow_the_layout_of_the_callers_tensor(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    with opened(bundle) as program:
        wide = numpy.zeros((4, 2 * FLOATS), "float32")
        for x in (wide[:, ::2], wide[::-1, :FLOATS], numpy.asfortranarray(wide[:, :FLOATS])):
            result = program(x)
            assert result["same"] is x
            result["tail"][1, 2] = 9
            assert x[1, 6] == 9
            x[1, 6] = 0


# --- the cpu target --------------------------------------------------------------------------------------------------


class KeepingWeights(FakeBackend):
    """Holds weight 0 in its own memory. Returns wrong numbers for outputs that are aliases."""

    def __init__(self, manifest: Manifest, compute: Any) -> None:
        super().__init__(manifest, compute)
        self.weight = (ctypes.c_float * 6)(*range(6))

    @property
    def owner(self) -> object:
        return self.weight

    def address(self, weight: int, stream: object = None) -> int:
        assert weight == 0
        return ctypes.addressof(self.weight)


def model(outputs: str = "copy", on_miss: str = "pad", *, turned: bool = False) -> tuple[Program, KeepingWeights]:
    """Returns a program with the outputs y = 2 x, weight[2:], y.t(), x, x[:, 1:], and for a fixed size y[0]."""
    manifest = signature(
        [dimension("batch", 2, 4)],
        [spec("x", "batch", 3)],
        [spec("y", "batch", 3), spec("w", 4), spec("turned", 3, "batch"), spec("same", "batch", 3), spec("part", "batch", 2)],
        output_orders=[(1, 0) if turned else (0, 1), (0,), (0, 1), (0, 1), (0, 1)],
    )
    aliases = (
        Alias(output=1, memory="weights", index=0), Alias(output=2, memory="outputs", index=0),
        Alias(output=3, memory="inputs", index=0), Alias(output=4, memory="inputs", index=0),
    )  # fmt: skip

    def placed(program: Any) -> Any:
        values = list(program.values)
        y = values[program.outputs[0]]
        values[program.outputs[1]] = replace(values[program.outputs[1]], offset=8)
        values[program.outputs[2]] = replace(values[program.outputs[2]], strides=y.strides[::-1])
        values[program.outputs[4]] = replace(values[program.outputs[4]], strides=(3, 1), offset=4)
        return replace(program, values=tuple(values))

    row = replace(manifest.weights[0], shape=(6,), strides=(1,))
    manifest = edited(manifest, aliases=aliases, weights=(row,), programs=tuple(map(placed, manifest.entries[0].programs)))
    check_aliases(manifest, manifest.entries[0])
    check_alias_spans(manifest, manifest.entries[0])

    def compute(key: tuple[int, ...], given_: list[Numbers]) -> list[Numbers]:
        rows = key[0]
        return [[2 * x for x in given_[0]], [-1.0] * 4, [-1.0] * (3 * rows), [-1.0] * (3 * rows), [-1.0] * (2 * rows)]

    backend = KeepingWeights(manifest, compute)
    return Program(manifest, backend, on_miss, outputs), backend


def convert(x: Any, library: str) -> Any:
    if library == "plain":
        return from_bytes(x.tobytes(), "float32", x.shape)
    return x if library == "numpy" else pytest.importorskip("torch").from_numpy(x)


def shown(value: Any) -> Any:
    return (value.tensor if isinstance(value, View) else value).tolist()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("outputs", ["copy", "view"])
@pytest.mark.parametrize("library", ["plain", "numpy", "torch"])
def test_outputs_share_as_in_eager(library: str, outputs: str, turned: bool) -> None:
    run, backend = model(outputs, turned=turned)
    x = convert(numpy.arange(6, dtype="float32").reshape(2, 3), library)
    y, w, flipped, same, part = run(x)
    assert shown(y) == [[0, 2, 4], [6, 8, 10]] and shown(flipped) == [[0, 6], [2, 8], [4, 10]]
    assert same is x and part.tolist() == [[1, 2], [4, 5]] and w.tolist() == [2, 3, 4, 5]
    assert [isinstance(value, View) for value in (y, w, flipped, same, part)] == [*[outputs == "view", False] * 2, False]
    if library != "plain":
        part[0, 0] = 50
        assert x[0, 1] == 50
        w[0] = 60
        assert backend.weight[2] == 60
        first, second = (value.tensor if isinstance(value, View) else value for value in (y, flipped))
        second[2, 0] = 70
        assert first[0, 2] == 70
        fresh = run(x)
        assert fresh[1][0] == 60 and type(fresh[4]) is type(x)


@pytest.mark.parametrize("library", ["plain", "numpy", "torch"])
@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_a_padded_call_shares_what_still_fits(library: str, outputs: str) -> None:
    run, backend = model(outputs)
    x = convert(numpy.arange(9, dtype="float32").reshape(3, 3), library)
    y, w, flipped, same, part = run(x)
    assert same is x and shown(y) == [[0, 2, 4], [6, 8, 10], [12, 14, 16]]
    assert shown(flipped) == [[0, 6, 12], [2, 8, 14], [4, 10, 16]] and shown(part) == [[1, 2], [4, 5], [7, 8]]
    if library != "plain":
        first, second = (value.tensor if isinstance(value, View) else value for value in (y, flipped))
        second[2, 0] = 70
        assert first[0, 2] == 70
        (part.tensor if isinstance(part, View) else part)[0, 0] = 50
        assert x[0, 1] == 1, "a tensor of its own"
        w[0] = 60
        assert backend.weight[2] == 60


@pytest.mark.parametrize("library", ["plain", "numpy", "torch"])
def test_a_call_that_is_cut_gets_tensors_of_its_own(library: str) -> None:
    run, backend = model()
    x = convert(numpy.arange(18, dtype="float32").reshape(6, 3), library)
    y, w, flipped, same, part = run(x)
    assert same is x and y.tolist() == (2 * numpy.arange(18).reshape(6, 3)).tolist()
    assert flipped.tolist() == (2 * numpy.arange(18).reshape(6, 3)).T.tolist()
    assert part.tolist() == numpy.arange(18).reshape(6, 3)[:, 1:].tolist() and w.tolist() == [2, 3, 4, 5]
    if library != "plain":
        w[0] = 60
        assert backend.weight[2] == 2


def test_an_input_without_such_a_part_is_refused_before_anything_runs() -> None:
    manifest = signature([], [spec("x", 2, 3)], [spec("flat", 6)])
    manifest = edited(manifest, aliases=(Alias(output=0, memory="inputs", index=0),))
    backend = KeepingWeights(manifest, lambda key, given_: [[0.0] * 6])
    run = Program(manifest, backend, "pad", "copy")
    x = numpy.zeros((2, 3), "float32")
    (flat,) = run(x)
    assert numpy.shares_memory(flat, x)
    for other in (numpy.asfortranarray(x), numpy.zeros((2, 6), "float32")[:, ::2]):
        with raises("input-layout", match="input 'x': output 'flat' shares its memory, and its layout is not the r") as caught:
            run(other)
        assert caught.value.hint == CATALOGUE["input-layout"].hint == "pass input.contiguous()"
    assert len(backend.calls) == 1
    torch = pytest.importorskip("torch")
    with raises("input-layout"):
        run(torch._neg_view(torch.zeros(2, 3)))


def test_a_read_only_array_stays_read_only() -> None:
    run, _ = model()
    x = numpy.zeros((2, 3), "float32")
    x.flags.writeable = False
    outputs = run(x)
    assert outputs[3] is x and not outputs[4].flags.writeable


# --- views in other layouts ------------------------------------------------------------------------------------------


@st.composite
def looks(draw: st.DrawFn) -> tuple[Any, Any, Any, bool]:
    """Draws a shape, a function that makes a view of an array, the axis order of another layout, and whether the view keeps the
    axes separate."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    slices = []
    for size in shape:
        begin = draw(st.integers(0, size - 1))
        slices.append(slice(begin, draw(st.integers(begin + 1, size)), draw(st.integers(1, 2))))
    order = draw(st.permutations(range(len(shape))))
    split = draw(st.sampled_from(["none", "flatten", "diagonal", "expand"]))

    def take(array_: Any) -> Any:
        view = array_[tuple(slices)].transpose(order)
        if split == "flatten":
            return view.reshape(-1)
        if split == "diagonal" and view.ndim > 1:
            return view.diagonal()
        return numpy.broadcast_to(view, (2, *view.shape)) if split == "expand" else view

    return shape, take, draw(st.permutations(range(len(shape)))), split != "flatten"


@settings(max_examples=400)
@given(looks(), st.booleans())
def test_a_view_exists_in_another_layout_if_numpy_makes_one(drawn: tuple[Any, Any, Any, bool], gaps: bool) -> None:
    shape, take, other_order, apart = drawn
    base = numpy.arange(int(numpy.prod(shape)), dtype="float32").reshape(shape)
    seen = take(base)
    if not numpy.shares_memory(seen, base):
        return  # NumPy copied, as eager PyTorch does: the result is no view
    begin = seen.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    spread = numpy.zeros([size * (2 if gaps else 1) for size in (shape[axis] for axis in other_order)], "float32")
    caller = spread[tuple([slice(None, None, 2 if gaps else 1)] * len(shape))].transpose(numpy.argsort(other_order))
    caller[...] = base
    look = AliasLayout(_value(seen), _value(base), begin, whole=False)
    there = rebase(look, caller.strides)
    wanted = take(caller)
    if there is None:
        assert not apart
        return
    offset, steps = there
    start = caller.__array_interface__["data"][0] + offset
    assert _read(start, seen.shape, steps) == wanted.tolist() == seen.tolist()


def _value(array_: Any) -> Value:
    return Value(dtype="float32", shape=array_.shape, strides=tuple([s // 4 for s in array_.strides]), memory="host", offset=0)


def _read(at: int, shape: Sequence[int], steps: Sequence[int]) -> Any:
    if not shape:
        return ctypes.c_float.from_address(at).value
    return [_read(at + index * steps[0], shape[1:], steps[1:]) for index in range(shape[0])]


@pytest.mark.parametrize(
    "take", [lambda x: x[:, 1:], lambda x: x.T, lambda x: x[1], lambda x: x.diagonal(), lambda x: x[None, ::2]]
)
def test_ordinary_looks_are_found(take: Any) -> None:
    base = numpy.arange(12, dtype="float32").reshape(3, 4)
    seen = take(base)
    begin = seen.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    assert rebase(AliasLayout(_value(seen), _value(base), begin, whole=False), (4, 12)) is not None


# --- the manifest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"output": 9}, r"aliases\[4\].output: no output 9"),
        ({"index": 3}, r"aliases\[4\].index: that weight is in another memory"),
        ({"memory": "arena"}, r"aliases\[4\].memory: expected one of inputs"),
        ({"memory": "outputs", "index": 1}, r"aliases\[4\].index: an output that is an alias itself"),
        ({"memory": "inputs", "index": 3}, r"aliases\[4\].index: no number 3 of the inputs"),
        ({"memory": "inputs", "index": 0}, r"programs\[0\].outputs\[5\]: an alias in memory weights, of something in inputs"),
    ],
)
def test_aliases_that_are_not_sound(bundle: tuple[Manifest, Path], change: dict[str, Any], words: str) -> None:
    manifest, _ = bundle
    broken = edited(manifest, aliases=(*manifest.entries[0].aliases[:-1], replace(manifest.entries[0].aliases[-1], **change)))
    with raises("manifest-invalid", match=words):
        broken = manifest_json.decode(manifest_text.encode(broken))
        check_aliases(broken, broken.entries[0])
        check_alias_spans(broken, broken.entries[0])


def test_an_alias_outside_of_what_it_lies_in(bundle: tuple[Manifest, Path]) -> None:
    manifest, _ = bundle
    for offset, words in ((8, "lies outside of what it shares memory with"), (-4, "lies outside")):
        programs = []
        for program in manifest.entries[0].programs:
            values = list(program.values)
            place = program.outputs[4]
            values[place] = replace(values[place], offset=values[place].offset + offset * (10 if offset < 0 else 1))
            programs.append(replace(program, values=tuple(values)))
        with raises("manifest-invalid", match=rf"programs\[0\].outputs\[4\]: {words}"):
            broken = edited(manifest, programs=tuple(programs))
            check_alias_spans(broken, broken.entries[0])


def test_state_that_is_not_sound(bundle: tuple[Manifest, Path]) -> None:
    manifest, _ = bundle
    rows = {row.name: index for index, row in enumerate(manifest.weights)}

    def broken(name: str, **change: Any) -> Manifest:
        weights = list(manifest.weights)
        weights[rows[name]] = replace(weights[rows[name]], **change)
        return replace(manifest, weights=tuple(weights))

    for bad_manifest, words in (
        (broken("marks", offset=3), "is not aligned"), (broken("marks", offset=0), "overlaps another row of memory state"),
        (broken("marks", offset=2048), "outside memory state"), (broken("marks", tensor="total"), "is another weight's, too"),
        (edited(manifest, random=rows["total"]), "is not two integers"), (edited(manifest, random=99), "no weight 99"),
        (replace(manifest, regions=(replace(manifest.regions[0], constants=(("c", rows["total"]),)),)), "which lies on the GPU"),
    ):  # fmt: skip
        with raises("manifest-invalid", match=words):
            check_state(bad_manifest)
    check_state(manifest)
