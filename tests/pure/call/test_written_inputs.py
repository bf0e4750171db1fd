"""Inputs that a call mutates: the contents of the caller's tensors afterwards, and which tensors are refused."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle import self_test
from cgbundle.call.aliasing import apart, folds, reach, shared
from cgbundle.format import file_names, safetensors_files
from cgbundle.format.schema import Manifest
from cgbundle.gpu.backend import CudaBackend
from cgbundle.program import Program
from cgbundle.tensors.capsules import _capsule_new
from cgbundle.tensors.tensor import Tensor, from_bytes
from cgbundle.validate.manifest import check_manifest
from cgbundle.validate.module_state import Address
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import MemsetNode
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.cuda_bundles import FLOATS, INPUTS_AT, KEYS, inputs
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.fabricate import (
    ELEMENTS,
    FakeBackend,
    FakeResults,
    Numbers,
    _offsets,
    dimension,
    kept_self_test,
    signature,
    spec,
)
from tests.helpers.drivers.fake_driver import FakeDriver
from tests.helpers.raising import raises

numpy = pytest.importorskip("numpy")

ADDED = 10.0


class Writing(FakeBackend):
    """A backend that adds 10 to every element of the mutated inputs after its replay, in the memory that the call passes."""

    def run(self, program: int, addresses: Sequence[int], device: int | None, stream: object) -> FakeResults:
        results = super().run(program, addresses, device, stream)
        row = self.manifest.entries[0].programs[program]
        for index in self.manifest.entries[0].mutated_inputs:
            value = row.values[row.inputs[index]]
            kind = ELEMENTS[value.dtype]
            for offset in _offsets(value):
                kind.from_address(addresses[index] + offset * ctypes.sizeof(kind)).value += kind(int(ADDED)).value
        return results


def model(order: tuple[int, ...] = (0, 1), dtype: str = "float32") -> Manifest:
    """Returns a manifest: the second input x is mutated, and y[batch, 3] is x before the call."""
    manifest = signature(
        [dimension("batch", 2, 4, pad="no", chunk=False, reason="forward() writes to its input 'x'")],
        [spec("scale"), spec("x", "batch", 3, order=order, dtype=dtype), spec("other", 3)],
        [spec("y", "batch", 3, dtype=dtype)],
    )
    return edited(manifest, mutated_inputs=(1,))


def copies(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
    return [list(inputs[1])]


def program(manifest: Manifest, outputs: str = "copy") -> tuple[Program, Writing]:
    backend = Writing(manifest, copies)
    return Program(manifest, backend, "pad", outputs), backend


def arrays(batch: int = 2, dtype: str = "float32") -> tuple[Any, Any, Any]:
    x = numpy.arange(3 * batch, dtype=dtype).reshape(batch, 3)
    return numpy.ones((), "float32"), x, numpy.zeros(3, "float32")


# --- what changes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_the_callers_array_changes_in_place(dtype: str) -> None:
    run, backend = program(model(dtype=dtype))
    scale, x, other = arrays(dtype=dtype)
    before = x.copy()
    for round_ in range(1, 4):
        (y,) = run(scale, x, other)
        assert y.tolist() == (before + 10 * (round_ - 1)).tolist()
        assert x.tolist() == (before + 10 * round_).tolist()
    assert scale == 1 and other.tolist() == [0] * 3
    assert len(backend.calls) == 3


LAYOUTS = {
    "dense": lambda x: x,
    "fortran": numpy.asfortranarray,
    "columns": lambda x: numpy.repeat(x, 2, axis=1)[:, ::2],
    "reversed": lambda x: x[::-1].copy()[::-1],
    "part": lambda x: numpy.pad(x, 2)[2:-2, 2:-2],
    "field": lambda x: _field(x),
}


def _field(x: Any) -> Any:
    records = numpy.zeros(x.shape, numpy.dtype([("tag", "u1"), ("number", x.dtype)]))
    records["number"] = x
    return records["number"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_whatever_its_layout_it_holds_what_was_written(layout: str, order: tuple[int, int], outputs: str) -> None:
    run, _ = program(model(order), outputs)
    scale, plain, other = arrays(4)
    x = LAYOUTS[layout](plain)
    if x.base is not None:
        around = x.base.copy()
    (y,) = run(scale, x, other)
    assert x.tolist() == (plain + ADDED if layout != "dense" else x).tolist() and x[0, 0] == ADDED
    assert numpy.asarray(y).tolist() == [[float(3 * row + column) for column in range(3)] for row in range(4)]
    if layout == "part":
        assert x.base.sum() == around.sum() + ADDED * x.size, "and nothing around it"


def test_torch_tensors_change_whatever_their_layout_or_their_lazy_sign() -> None:
    torch = pytest.importorskip("torch")
    run, _ = program(model())
    plain = torch.arange(6.0).reshape(2, 3)
    for x in (
        plain.clone(), plain.clone().requires_grad_(), plain.t().contiguous().t(), torch.stack([plain, plain], -1)[..., 1],
        torch._neg_view(-plain),
    ):  # fmt: skip
        (y,) = run(torch.ones(()), x, torch.zeros(3))
        assert torch.equal(x, plain + ADDED) and torch.equal(y, plain)


def test_our_own_tensors_change() -> None:
    run, _ = program(model())
    data = array("f", range(6)).tobytes()
    for turned in (False, True):
        x = from_bytes(data, "float32", (3, 2) if turned else (2, 3))
        if turned:
            x = Tensor(x.address, "float32", (2, 3), (1, 2), x)
        before = x.tolist()
        (y,) = run(from_bytes(bytes(4), "float32", ()), x, from_bytes(bytes(12), "float32", (3,)))
        assert x.tolist() == [[number + ADDED for number in row] for row in before] and y.tolist() == before


def test_two_parts_of_one_array_may_be_two_inputs() -> None:
    both = signature([], [spec("x", 4, 3), spec("y", 4, 3)], [spec("z", 4, 3)])
    both = edited(both, mutated_inputs=(0, 1))
    for cut in (lambda w: (w[0], w[1]), lambda w: (w[:, 0], w[:, 1]), lambda w: (w[..., 0], w[..., 1])):
        for shape in ((2, 4, 3), (4, 2, 3), (4, 3, 2)):
            whole = numpy.zeros(shape, "float32")
            one, other = cut(whole)
            if one.shape != (4, 3):
                continue
            run, _ = program(both)
            run(one, other)
            assert (whole == ADDED).all()


# --- what is refused -----------------------------------------------------------------------------------------------


def refused(words: str, *arguments: Any) -> None:
    run, backend = program(model())
    with raises("input-unwritable", match=words) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value) and caught.value.hint and caught.value.exit_code == 2
    assert backend.calls == []


def test_read_only_arrays_are_refused() -> None:
    scale, x, other = arrays()
    x.flags.writeable = False
    refused("input 'x': the model writes to it, and the array is read-only", scale, x, other)
    run, _ = program(model())
    fresh = x.copy()
    for input_array in (scale, other):
        input_array.flags.writeable = False
    run(scale, fresh, other)  # the call does not write to these


def test_a_number_of_numpy_is_refused() -> None:
    manifest = edited(signature([], [spec("x")], [spec("y")]), mutated_inputs=(0,))
    run, _ = program(manifest)
    with raises("input-unwritable", match="read-only"):
        run(numpy.float32(1))


def test_memory_that_is_used_twice_is_refused() -> None:
    scale, x, other = arrays()
    refused("input 'x': the model writes to it, and it shares memory with input 'other'", scale, x, x[0])
    refused("input 'x': the model writes to it, and it shares memory with input 'other'", scale, x, x[1][::-1])
    wide = numpy.zeros(12, "float32")
    refused("shares memory with input 'other'", scale, wide[:6].reshape(2, 3), wide[5:8])
    refused("and its elements share memory", scale, numpy.lib.stride_tricks.as_strided(x, (2, 3), (0, 4)), other)
    refused("and its elements share memory", scale, numpy.lib.stride_tricks.as_strided(wide, (2, 3), (4, 4)), other)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


class Lent:
    """A tensor of another library, exported by DLPack."""

    def __init__(self, value: Any, versioned: bool) -> None:
        self.value, self.versioned = value, versioned

    def __dlpack__(self, *, max_version: Any = None, **options: Any) -> object:
        if max_version is not None and not self.versioned:
            raise TypeError("an earlier version of DLPack")
        return self.value.__dlpack__(max_version=max_version) if max_version else self.value.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.skipif(tuple(map(int, numpy.__version__.split(".")[:2])) < (2, 1), reason="NumPy 2.1 speaks DLPack 1.0")
def test_a_library_that_lends_its_memory_says_whether_it_may_be_written_to() -> None:
    scale, x, other = arrays()
    run, backend = program(model())
    lent = Lent(x, versioned=True)
    run(Lent(scale, True), lent, Lent(other, True))
    assert x[0, 0] == ADDED
    kinds = [(Lent(x, versioned=False), r"its library \(tests?.*\) does not say whether it may be written to")]
    jax = Lent(x, versioned=True)
    kinds.append((type("Array", (Lent,), {"__module__": "jaxlib.xla"})(x, True), "arrays of jaxlib never change"))
    for value, words in kinds:
        refused(words, Lent(scale, True), value, Lent(other, True))
    refused("not laid out as recorded", Lent(scale, True), Lent(numpy.asfortranarray(x), True), Lent(other, True))
    assert jax is not None and len(backend.calls) == 1


def test_a_capsule_that_says_read_only_is_refused() -> None:
    from cgbundle.tensors import capsules

    managed = capsules._Versioned(1, 0, None, None, capsules.READ_ONLY)
    capsule = _capsule_new(ctypes.addressof(managed), b"dltensor_versioned", None)

    class ReadOnly:
        def __dlpack__(self, max_version: Any = None) -> object:
            return capsule

    with raises("input-unwritable", match="shares it read-only"):
        capsules.check_writable(ReadOnly(), "x")
    managed.flags = 2
    capsules.check_writable(ReadOnly(), "x")


def test_guards_speak_first_and_change_nothing() -> None:
    run, backend = program(model())
    scale, x, other = arrays()
    for given_, kind in (
        ((scale, x.astype("int64"), other), "input-dtype"),
        ((scale, x[0], other), "input-shape"),
        ((scale, numpy.asfortranarray(numpy.zeros((2, 3, 1), "float32")), other), "input-shape"),
        ((scale, numpy.zeros((3, 3), "float32"), other), "key-missing"),
        ((scale, numpy.zeros((9, 3), "float32"), other), "key-missing"),
        ((scale, x), "input-structure"),
    ):
        with raises(kind):
            run(*given_)
    with raises("input-structure", match="expected 3 inputs, got 2"):
        run.replay([scale, x])
    assert backend.calls == [] and x.sum() == 15


def test_an_unrecorded_size_says_why() -> None:
    run, _ = program(model())
    with raises("key-missing", match=r"batch cannot be padded: forward\(\) writes to its input 'x'"):
        run(*arrays(3))


def test_views_keep_the_inputs_that_they_may_lie_in() -> None:
    run, _ = program(model(), "view")
    scale, x, other = arrays()
    run(scale, x, other)
    assert any(held is x for held in run._kept_inputs)
    run.close()
    assert not run._kept_inputs


# --- memory that is shared -----------------------------------------------------------------------------------------

shapes = st.lists(st.tuples(st.integers(0, 3), st.integers(-4, 4)), max_size=3)


def bytes_of(address: int, axes: list[tuple[int, int]], item: int) -> list[int]:
    """Returns the address of every byte of every element."""
    places = [address]
    for size, stride in axes:
        places = [place + index * stride * item for place in places for index in range(size)]
    return [place + byte for place in places for byte in range(item)]


@given(shapes, shapes, st.integers(0, 24), st.sampled_from([1, 4]), st.sampled_from([1, 4]))
def test_tensors_that_are_called_apart_share_no_byte(
    one: list[tuple[int, int]], other: list[tuple[int, int]], between: int, item: int, items: int
) -> None:
    first, second = (
        reach(address, [length for length, _ in axes], [stride * size for _, stride in axes], size)
        for address, axes, size in ((1000, one, item), (1000 + between, other, items))
    )
    mine, theirs = bytes_of(1000, one, item), bytes_of(1000 + between, other, items)
    for addresses, tensor in ((mine, first), (theirs, second)):
        assert not addresses or (tensor.start, tensor.end) == (min(addresses), max(addresses) + 1)
        assert folds(tensor) or len(addresses) == len(set(addresses))
    common = set(mine) & set(theirs)
    if apart(first, second):
        assert not common
    assert apart(first, second) == apart(second, first)
    assert bool(common) <= bool(list(shared([first, second], [0])))
    assert list(shared([first, second], [])) == []


def test_of_many_tensors_the_pairs_that_share_are_found() -> None:
    row = [reach(100 * place, (25,), (4,), 4) for place in range(50)]
    assert list(shared(row, range(50))) == []
    odd = [*row, reach(4990, (25,), (4,), 4)]
    assert sorted(shared(odd, [50])) == [(50, 49)]
    assert sorted(shared(odd, [49])) == [(49, 50)]
    assert sorted(shared([reach(0, (100,), (4,), 4), reach(4, (2,), (4,), 4), reach(200, (2,), (4,), 4)], [2])) == [(2, 0)]


# --- the manifest and the self-test -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "words"),
    [((3,), "mutated_inputs: no such input"), ((-1,), "mutated_inputs: no such input"), ((1, 1), "mutated_inputs: not ascending"),
     ((1, 0), "mutated_inputs: not ascending")],
)  # fmt: skip
def test_written_inputs_are_positions(written: tuple[int, ...], words: str) -> None:
    with raises("manifest-invalid", match=words):
        check_manifest(edited(model(), mutated_inputs=written))


@pytest.mark.parametrize("change", [{"pad": "rows"}, {"pad": "zeros"}, {"chunk": True}])
def test_a_bundle_that_writes_inputs_cannot_be_padded_or_chunked(change: dict[str, Any]) -> None:
    manifest = model()
    with raises("manifest-invalid", match=r"dimensions\[0\].pad: batch is padded or chunked, and calls write to their inputs"):
        check_manifest(edited(manifest, dimensions=(replace(manifest.entries[0].dimensions[0], **change),)))


@pytest.mark.parametrize(("stored", "passes"), [(ADDED, True), (ADDED + 1, False)])
def test_the_self_test_compares_what_was_written(tmp_path: Path, stored: float, passes: bool) -> None:
    manifest = signature([], [spec("x", 2)], [spec("y", 2)])
    manifest = edited(manifest, mutated_inputs=(0,), self_test=replace(manifest.entries[0].self_test, bounds=(1e-5, 1e-5)))
    numbers = {"input": [1.0, 2.0], "output": [1.0, 2.0], "mutated": [1.0 + stored, 2.0 + stored]}
    entries: dict[str, Any] = {
        file_names.self_test_entry((), kind, 0): ("float32", (2,), lambda values=values: array("f", values))
        for kind, values in numbers.items()
    }
    with open(tmp_path / file_names.SELF_TEST, "wb") as file:
        safetensors_files.write(file, entries)
    backend = Writing(manifest, lambda key, inputs: [list(inputs[0])])
    (result,) = self_test.replay_self_test(Program(manifest, backend, "pad", "copy", self_test=kept_self_test(str(tmp_path))))
    assert result.exact is passes and result.passed(manifest.entries[0].self_test.compare) is passes
    assert (result.error > 0.05) is not passes


# --- on a GPU ------------------------------------------------------------------------------------------------------

LEFT = 0x40400000
"""3.0, which the recording below writes to its input."""


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Manifest, Path]:
    """Writes the bundle of cuda_bundles.py, with a node at the end of each recording that fills the input with 3.0."""
    folder = tmp_path / "tiny.cgb"
    manifest = cuda_bundles.write(folder, b"an image")
    for key in KEYS:
        file = folder / "graphs" / f"g0-{key}.bin"
        recording = tables.decode(file.read_bytes())
        fill = MemsetNode(
            target=Address(memory=INPUTS_AT, offset=0), value=LEFT, element=4, width=key * FLOATS, height=1, pitch=0
        )  # fmt: skip
        last = cuda_bundles.edge(len(recording.nodes) - 1, len(recording.nodes))
        changed = replace(recording, nodes=(*recording.nodes, fill), edges=(*recording.edges, last))
        file.write_bytes(tables.encode(changed))
    return edited(manifest, inputs=(spec("x", 1),), mutated_inputs=(0,)), folder


def calls_on(fake: FakeDriver, bundle: tuple[Manifest, Path], mode: str, lazy: bool = False) -> CudaBackend:
    manifest, folder = bundle
    return CudaBackend(ArchiveOf(folder, manifest), 0, mode, lazy=lazy)


@pytest.mark.parametrize("mode", ["graph", "stream"])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_tensor_of_the_gpu_is_updated_in_the_order_of_the_stream(
    fake: FakeDriver, bundle: tuple[Manifest, Path], mode: str, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_on(fake, bundle, mode, lazy)
    seen: list[tuple[int, int, int, int]] = []
    real = fake.do_cuMemcpyDtoDAsync

    def watched(target: int, source: int, size: int, stream: int) -> None:
        seen.append((int(target), int(source), size, int(stream)))
        real(target, source, size, stream)

    monkeypatch.setattr(fake, "do_cuMemcpyDtoDAsync", watched)
    for number in (1, 0, 1):
        given_ = inputs(KEYS[number], seed=number)
        memory = ctypes.create_string_buffer(given_.tobytes(), 4 * len(given_))
        address = ctypes.addressof(memory)
        (place,), before = calls.buffers(number)[0], len(fake.calls)
        seen.clear()
        with calls.locked(5) as stream:
            (output,) = calls.run(number, [address], 0, stream).addresses
        assert array("f", ctypes.string_at(output, 4 * len(given_))) == cuda_bundles.expected(given_)
        assert array("f", memory.raw) == array("f", [3.0] * len(given_))
        first, last = seen[0], seen[-1]
        assert first == (place, address, 4 * len(given_), 5) and last == (address, place, 4 * len(given_), 5)
        driver_calls = fake.calls[before:]
        assert "cuMemcpyDtoHAsync" not in driver_calls
        if not lazy:
            assert "cuStreamSynchronize" not in driver_calls, "nothing waits"
    ((place,), _) = calls.buffers(0)
    with calls.locked(None) as stream:
        seen.clear()
        calls.run(0, [place], 0, stream)
        assert not any(source == place for _, source, _, _ in seen), "it is up to date already"
    calls.close()


@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_memory_of_the_cpu_is_updated_before_the_call_returns(fake: FakeDriver, bundle: tuple[Manifest, Path], mode: str) -> None:
    calls = calls_on(fake, bundle, mode)
    for number in (0, 1, 0):
        given_ = inputs(KEYS[number], seed=number)
        wanted = cuda_bundles.expected(given_)
        start, count = given_.buffer_info()
        before = len(fake.calls)
        with calls.locked(None) as stream:
            results = calls.run(number, [start], None, stream)
        assert array("f", ctypes.string_at(results.addresses[0], 4 * count)) == wanted
        assert given_ == array("f", [3.0] * count)
        driver_calls = [name for name in fake.calls[before:] if name.startswith(("cuMemcpyDtoH", "cuStreamSynchronize"))]
        assert driver_calls[-2:] == ["cuMemcpyDtoHAsync", "cuStreamSynchronize"]
    calls.close()


def test_a_bundle_that_does_not_write_copies_nothing_back(fake: FakeDriver, tmp_path: Path) -> None:
    """Whether inputs must be copied back is decided when the bundle is loaded."""
    folder = tmp_path / "tiny.cgb"
    manifest = cuda_bundles.write(folder, b"an image")
    copies = []
    for written in ((), (0,)):
        calls = calls_on(fake, (edited(manifest, mutated_inputs=written), folder), "graph")
        x = inputs(KEYS[0])
        before = len(fake.calls)
        with calls.locked(None) as stream:
            calls.run(0, [x.buffer_info()[0]], 0, stream)
        copies.append(fake.calls[before:].count("cuMemcpyDtoDAsync"))
        calls.close()
    assert copies == [2, 3], "the input, the copy step, and what was written"
