"""safetensors files: their bytes, reading and writing compared with the `safetensors` package, and one test for each defect of a
header."""

from __future__ import annotations

import ctypes
import io
import json
import mmap
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.errors import BundleError
from cgbundle.format import limits, safetensors_files
from cgbundle.format.safetensors import ALIGNMENT, CODES, nbytes, read_header
from cgbundle.format.safetensors_files import Mapped
from cgbundle.format.schema import DTYPES
from tests.helpers.raising import raises

Contents = dict[str, tuple[str, tuple[int, ...], bytes]]


def write(path: Path, tensors: Contents) -> Path:
    with open(path, "wb") as file:
        safetensors_files.write(
            file, {name: (dtype, shape, lambda data=data: data) for name, (dtype, shape, data) in tensors.items()}
        )
    return path


def read(path: Path) -> Contents:
    mapped = Mapped(str(path), "weights")
    try:
        return {name: (entry.dtype, entry.shape, bytes(mapped.data(name))) for name, entry in mapped.entries.items()}
    finally:
        mapped.close()


SAMPLE: Contents = {
    "b": ("float32", (2, 3), bytes(range(24))),
    "a": ("int64", (), bytes(range(8))),
    "empty": ("float16", (0, 4), b""),
    "big": ("uint8", (512,), bytes(512)),
}


# --- the bytes -----------------------------------------------------------------------------------------------------


def test_a_file_is_length_header_and_data_literally(tmp_path: Path) -> None:
    data = write(tmp_path / "w", {"x": ("int16", (2,), b"\1\2\3\4")}).read_bytes()
    header = b'{"x":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'
    assert data == struct.pack("<Q", 248) + header + b" " * (248 - len(header)) + b"\1\2\3\4"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read(write(tmp_path / "w", SAMPLE)) == SAMPLE


def test_a_header_says_where_the_data_of_each_tensor_begins(tmp_path: Path) -> None:
    data = write(tmp_path / "w", SAMPLE).read_bytes()
    places = safetensors_files.write_header(io.BytesIO(), {name: (dtype, shape) for name, (dtype, shape, _) in SAMPLE.items()})
    assert {name: data[place:][: len(SAMPLE[name][2])] for name, place in places.items()} == {
        name: contents for name, (_, _, contents) in SAMPLE.items()
    }


def test_an_open_file_is_mapped_from_its_first_byte_and_unmapped_by_close(tmp_path: Path) -> None:
    path = write(tmp_path / "w", SAMPLE)
    with open(path, "rb") as file:
        file.read(3)
        mapped = Mapped(file.fileno(), "weights")
    assert bytes(mapped.data("b")) == SAMPLE["b"][2]
    assert str(path) in Path("/proc/self/maps").read_text()
    mapped.close()
    assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("refuses", [False, True], ids=["Linux 5.14", "older"])
def test_the_kernel_is_asked_for_all_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    path, calls = write(tmp_path / "w", SAMPLE), []

    class Libc:
        def __init__(self, name: None) -> None: ...

        def madvise(self, address: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
            calls.append((address.value, size.value, advice))
            return -1 if refuses and advice == 22 else 0

    mapped = Mapped(str(path), "weights")
    begin = mapped.address("big") - mapped.entries["big"].begin
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", Libc)
        mapped.populate()
    mapped.close()
    assert calls == [(begin, path.stat().st_size, advice) for advice in ((22, mmap.MADV_WILLNEED) if refuses else (22,))]


tensors_of_any_kind = st.dictionaries(
    st.text(st.characters(exclude_categories=["C", "Z"]), max_size=6).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(CODES)), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    max_size=5,
)


@settings(max_examples=50, deadline=None)
@given(tensors_of_any_kind, st.randoms(use_true_random=False))
def test_any_tensors_survive_the_round_trip_in_any_order(kinds: dict[str, Any], chance: random.Random) -> None:
    tensors = {name: (dtype, shape, chance.randbytes(nbytes(dtype, shape))) for name, (dtype, shape) in kinds.items()}
    names = list(tensors)
    chance.shuffle(names)
    file, shuffled = io.BytesIO(), io.BytesIO()
    for target, order in ((file, list(tensors)), (shuffled, names)):
        safetensors_files.write(target, {name: (*tensors[name][:2], lambda name=name: tensors[name][2]) for name in order})
    assert file.getvalue() == shuffled.getvalue()
    length = int.from_bytes(file.getvalue()[:8], "little")
    header = json.loads(file.getvalue()[8 : 8 + length])
    assert set(header) == set(tensors)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert file.getvalue()[8 + length + begin : 8 + length + end] == tensors[name][2]


def test_data_begins_aligned_and_whole_multiples_stay_aligned(tmp_path: Path) -> None:
    tensors: Contents = {
        "odd": ("uint8", (3,), b"abc"),
        "wide": ("float64", (3,), bytes(24)),
        "matrix": ("float32", (64, 2), bytes(512)),
        "half": ("bfloat16", (5,), bytes(10)),
        "page": ("uint8", (256,), bytes(256)),
    }
    mapped = Mapped(str(write(tmp_path / "w", tensors)), "w")
    try:
        for name, entry in mapped.entries.items():
            size = entry.end - entry.begin
            assert entry.begin % (ALIGNMENT if size % ALIGNMENT == 0 else DTYPES[entry.dtype]) == 0, name
            assert mapped.address(name) % ALIGNMENT == entry.begin % ALIGNMENT, name
    finally:
        mapped.close()


def test_entries_come_in_the_order_of_their_data(tmp_path: Path) -> None:
    with open(write(tmp_path / "w", SAMPLE), "rb") as file:
        begins = [entry.begin for entry in read_header(file, "w").values()]
    assert begins == sorted(begins)


def test_an_address_is_that_of_the_bytes(tmp_path: Path) -> None:
    import ctypes

    mapped = Mapped(str(write(tmp_path / "w", SAMPLE)), "w")
    try:
        for name, (_, _, data) in SAMPLE.items():
            assert ctypes.string_at(mapped.address(name), len(data)) == data
    finally:
        mapped.close()


def test_a_file_without_tensors_is_a_file(tmp_path: Path) -> None:
    assert read(write(tmp_path / "w", {})) == {}


def test_a_view_outlives_the_mapping(tmp_path: Path) -> None:
    mapped = Mapped(str(write(tmp_path / "w", SAMPLE)), "w")
    held = mapped.data("b")
    mapped.close()
    mapped.close()
    assert bytes(held) == SAMPLE["b"][2]


def test_a_closed_mapping_is_unmapped(tmp_path: Path) -> None:
    path = write(tmp_path / "w", SAMPLE)
    mapped = Mapped(str(path), "w")
    assert str(path) in Path("/proc/self/maps").read_text()
    mapped.close()
    assert str(path) not in Path("/proc/self/maps").read_text()


# --- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 7, 9])
def test_contents_of_another_length_than_the_shape_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"tensor 'x' gave {length} bytes, expected 8"):
        safetensors_files.write(io.BytesIO(), {"x": ("float32", (2,), lambda: bytes(length))})


def test_a_dtype_that_the_format_does_not_have_is_pairs_there(tmp_path: Path) -> None:
    """safetensors has no complex numbers: other readers see pairs of real numbers. Other metadata changes nothing."""
    tensors: Contents = {
        "plain": ("float64", (2, 2), bytes(range(32))),
        "x": ("complex128", (2,), bytes(range(32))),
        "one": ("complex128", (), bytes(range(16))),
        "none": ("complex128", (0, 3), b""),
    }
    path = write(tmp_path / "w", tensors)
    assert read(path) == tensors
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert (header["x"]["dtype"], header["x"]["shape"]) == ("F64", [2, 2]) and header["none"]["shape"] == [0, 3, 2]
    package = pytest.importorskip("safetensors.numpy")
    assert package.load_file(path)["one"].tobytes() == tensors["one"][2]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"complex128": "nothing"}, "tensor 'nothing' is no complex128"),
        ({"complex128": "flat"}, "tensor 'flat' is no complex128"),
        ({"complex128": "three"}, "tensor 'three' is no complex128"),
        ({"complex128": "single"}, "tensor 'single' is no complex128"),
        ({"complex128": "pairs\npairs"}, "tensor 'pairs' is no complex128"),
        ({"complex128": ""}, "tensor '' is no complex128"),
    ],
)
def test_metadata_that_names_what_are_no_pairs_is_refused(tmp_path: Path, metadata: dict[str, str], message: str) -> None:
    path = write(
        tmp_path / "w",
        {
            "pairs": ("float64", (2, 2), bytes(32)), "flat": ("float64", (), bytes(8)), "three": ("float64", (3,), bytes(24)),
            "single": ("float32", (2,), bytes(8)),
        },
    )  # fmt: skip
    with raises("weights-invalid", match=message):
        read(rewritten(path, metadata))


def test_metadata_of_others_says_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "w", {"x": ("float64", (2,), bytes(16))})
    for metadata in ({}, {"format": "pt"}, {"complex128": 3}, [], "text"):
        assert read(rewritten(path, metadata))["x"][:2] == ("float64", (2,))


def rewritten(path: Path, metadata: Any) -> Path:
    """Returns a copy of a file with other metadata."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = json.dumps({**json.loads(data[8 : 8 + length]), "__metadata__": metadata}).encode()
    copy = path.with_name("rewritten")
    copy.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return copy


def test_contents_are_asked_for_one_at_a_time_and_let_go() -> None:
    import weakref

    class Chunk(bytearray):
        pass

    alive: list[Any] = []

    def contents() -> Chunk:
        assert all(reference() is None for reference in alive[:-1]), "an earlier tensor is still held"
        chunk = Chunk(1024)
        alive.append(weakref.ref(chunk))
        return chunk

    safetensors_files.write(io.BytesIO(), {f"x{index}": ("uint8", (1024,), contents) for index in range(4)})
    assert len(alive) == 4


def test_arrays_of_any_shape_can_be_written(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    arrays = {
        "empty": numpy.zeros((0, 3), "float32"),
        "matrix": numpy.arange(6, dtype="float32").reshape(2, 3),
        "scalar": numpy.float32(7).reshape(()),
        "complex": numpy.arange(4).astype("complex64"),
        "bool": numpy.array([True, False]),
    }
    with open(tmp_path / "w", "wb") as file:
        safetensors_files.write(
            file, {name: (str(value.dtype), value.shape, lambda value=value: value) for name, value in arrays.items()}
        )
    tensors = read(tmp_path / "w")
    assert {name: data for name, (_, _, data) in tensors.items()} == {name: value.tobytes() for name, value in arrays.items()}


# --- both ways with the package ------------------------------------------------------------------------------------


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.numpy")
    tensors = package.load_file(write(tmp_path / "w", SAMPLE))
    assert {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in tensors.items()} == SAMPLE


def test_the_package_knows_every_dtype_code_that_we_write(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors")
    tensors: Contents = {dtype: (dtype, (2, 3), bytes(nbytes(dtype, (2, 3)))) for dtype in CODES}
    with package.safe_open(str(write(tmp_path / "w", tensors)), "numpy") as file:
        for dtype, code in CODES.items():
            assert file.get_slice(dtype).get_dtype() == code
            assert file.get_slice(dtype).get_shape() == [2, 3]


def test_we_read_what_the_package_writes(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    package = pytest.importorskip("safetensors.numpy")
    arrays = {
        "x": numpy.arange(6, dtype="float32").reshape(2, 3),
        "y": numpy.arange(3, dtype="int8"),
        "scalar": numpy.array(5, "int64"),
        "empty": numpy.zeros((2, 0), "float64"),
        "mask": numpy.array([True, False, True]),
    }
    package.save_file(arrays, tmp_path / "w", metadata={"format": "pt"})
    assert read(tmp_path / "w") == {name: (str(value.dtype), value.shape, value.tobytes()) for name, value in arrays.items()}


@settings(max_examples=40, deadline=None)
@given(tensors_of_any_kind, st.data())
def test_what_the_package_refuses_we_refuse(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, Any], data: st.DataObject
) -> None:
    """A header with one changed offset or axis is refused by both, or accepted by both."""
    package = pytest.importorskip("safetensors")
    file = io.BytesIO()
    safetensors_files.write(
        file, {name: (dtype, shape, lambda n=nbytes(dtype, shape): bytes(n)) for name, (dtype, shape) in kinds.items()}
    )
    length = int.from_bytes(file.getvalue()[:8], "little")
    header, body = json.loads(file.getvalue()[8 : 8 + length]), file.getvalue()[8 + length :]
    if header:
        entry = header[data.draw(st.sampled_from(sorted(header)))]
        numbers = data.draw(st.sampled_from([entry["data_offsets"], *([entry["shape"]] if entry["shape"] else [])]))
        place = data.draw(st.integers(0, len(numbers) - 1))
        numbers[place] = max(0, numbers[place] + data.draw(st.sampled_from([-8, -1, 0, 1, 8])))
    path = tmp_path_factory.mktemp("w") / "w"
    path.write_bytes(with_header(header, body))
    try:
        package.deserialize(path.read_bytes())
        fine = True
    except package.SafetensorError:
        fine = False
    if fine:
        with open(path, "rb") as opened:
            read_header(opened, "w")
    else:
        reject(path, "weights")


# --- defects -------------------------------------------------------------------------------------------------------


def with_header(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def reject(path: Path, message: str) -> None:
    with open(path, "rb") as file, raises("weights-invalid", match=message) as caught:
        read_header(file, "weights.safetensors")
    assert str(caught.value).startswith("weights.safetensors: ") and "\n" not in str(caught.value)


def test_the_header_of_the_defect_tests_is_fine_without_a_defect(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(with_header({"x": entry(), "__metadata__": {"a": "b"}}, b"1234"))
    assert read(tmp_path / "w") == {"x": ("uint8", (4,), b"1234")}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 9) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 100_000_001),
    ],
)
def test_a_length_beyond_the_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "w").write_bytes(data)
    reject(tmp_path / "w", "the header's length does not fit the file")


def test_a_header_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    with open(tmp_path / "w", "wb") as file:
        file.write(struct.pack("<Q", limits.JSON_BYTES + 1))
        file.truncate(limits.JSON_BYTES + 100)
    reject(tmp_path / "w", "more than the limit of")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"null",
        b"\xff\xfe",
        '{"x":1}'.encode("utf-16"),
        b"[" * 100_000,
        {"x": 7},
        {"x": []},
        {"x": {}},
        {"x": entry(dtype="F7")},
        {"x": entry(dtype="float32")},
        {"x": entry(dtype=["U8"])},
        {"x": entry(dtype=None)},
        {"x": entry(shape=None)},
        {"x": entry(shape="4")},
        {"x": entry(shape={"4": 1})},
        {"x": entry(shape=["4"])},
        {"x": entry(shape=[4.0])},
        {"x": entry(shape=[4, True])},
        {"x": entry(shape=[None])},
        {"x": entry(offsets=None)},
        {"x": entry(offsets=[0])},
        {"x": entry(offsets=[0, 4, 8])},
        {"x": entry(offsets=["0", "4"])},
        {"x": entry(offsets=[0.0, 4.0])},
        {"x": entry(offsets=[False, 4])},
        b'{"x":{"dtype":"U8","shape":[1e999],"data_offsets":[0,4]}}',
        b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,1e999]}}',
        b'{"x":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}',
    ],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, header: Any) -> None:
    (tmp_path / "w").write_bytes(with_header(header, b"1234"))
    reject(tmp_path / "w", "the header: |the header is no object|tensor 'x': ")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": entry(offsets=(1, 5))}, "tensor 'x' begins at byte"),
        ({"x": entry(offsets=(-1, 3))}, "tensor 'x': its data_offsets"),
        ({"x": entry(), "y": entry(offsets=(5, 9))}, "tensor 'y' begins at byte"),
        ({"x": entry(), "y": entry(offsets=(3, 7))}, "tensor 'y' begins at byte"),
        ({"x": entry(), "y": entry(offsets=(0, 4))}, "begins at byte"),
        ({"x": entry(shape=(0,), offsets=(0, -4))}, "tensor 'x': its data_offsets"),
    ],
)
def test_gaps_and_overlaps_are_refused(tmp_path: Path, header: Any, message: str) -> None:
    (tmp_path / "w").write_bytes(with_header(header, bytes(9)))
    reject(tmp_path / "w", message)


@pytest.mark.parametrize(
    "wrong",
    [entry(shape=(5,)), entry(shape=(3,)), entry(dtype="U16"), entry(shape=(-4,)), entry(shape=(-2, -2)), entry(shape=(10**30,))],
)
def test_a_shape_that_does_not_fit_its_bytes_is_refused(tmp_path: Path, wrong: Any) -> None:
    (tmp_path / "w").write_bytes(with_header({"x": wrong}, bytes(4)))
    reject(tmp_path / "w", "tensor 'x' has 4 bytes, its shape|tensor 'x': its shape is no list")


@pytest.mark.parametrize("length", [0, 3, 5, 100])
def test_a_file_of_another_length_than_the_header_promises_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "w").write_bytes(with_header({"x": entry()}, bytes(length)))
    reject(tmp_path / "w", f"the file has {length + 8 + len(json.dumps({'x': entry()}))} bytes, its header promises")


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[31m", "\ud800", "x" * (limits.NAME + 1)])
def test_the_name_of_a_tensor_cannot_break_the_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "w").write_bytes(with_header({name: entry()}, bytes(4)))
    reject(tmp_path / "w", "is not printable, or longer")


@pytest.mark.parametrize("axes", [limits.AXES + 1, 120_000])
def test_a_tensor_of_more_axes_than_any_library_has_is_refused(tmp_path: Path, axes: int) -> None:
    (tmp_path / "w").write_bytes(with_header({"x": entry(shape=(1,) * (axes - 1) + (4,))}, bytes(4)))
    reject(tmp_path / "w", "its shape is no list of at most 64 sizes")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "w", SAMPLE).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        reject(tmp_path / "cut", "header|bytes")


def test_a_flipped_bit_of_the_header_gives_an_error_or_a_well_formed_file(tmp_path: Path) -> None:
    """The format has no checksum (the bundle's manifest has), so a flipped bit may rename a tensor. It must never crash the
    reader."""
    whole = write(tmp_path / "w", SAMPLE).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for position in range(header):
        data = bytearray(whole)
        data[position] ^= 1 << (position % 8)
        (tmp_path / "flipped").write_bytes(data)
        with open(tmp_path / "flipped", "rb") as file:
            try:
                entries = read_header(file, "w")
            except BundleError:
                refused += 1
                continue
        covered = sorted((entry.begin, entry.end) for entry in entries.values() if entry.begin != entry.end)
        assert [begin for begin, _ in covered] == [header, *[end for _, end in covered[:-1]]]
        assert covered[-1][1] == len(whole)
    assert refused > header / 2


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, framed: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(with_header(data, b"") if framed else data)
    with open(path, "rb") as file:
        try:
            entries = read_header(file, "w")
        except BundleError:
            return
    assert entries == {} or sum(entry.end - entry.begin for entry in entries.values()) < len(data)


def test_the_limits_themselves_are_allowed(tmp_path: Path) -> None:
    shape = (1,) * limits.AXES
    path = write(tmp_path / "w", {"deep": ("uint8", shape, b"x")})
    mapped = Mapped(str(path), "w")
    assert mapped.entries["deep"].shape == shape and mapped.data("deep").readonly
    mapped.close()
    with open(tmp_path / "w", "wb") as file:
        file.write(struct.pack("<Q", limits.JSON_BYTES))
        file.truncate(limits.JSON_BYTES + 8)
    with raises("weights-invalid") as caught, open(tmp_path / "w", "rb") as file:
        read_header(file, "w")
    assert "limit" not in str(caught.value)
