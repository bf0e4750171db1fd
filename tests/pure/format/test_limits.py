"""Data beyond the format's limits is refused with a CgbundleError, in less than a second and 300 MB, for any caller."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cgbundle.errors import BundleError, CallError, CgbundleError
from cgbundle.format import archive, limits, manifest_json, pytree
from cgbundle.format.safetensors import read_header
from cgbundle.format.schema import Manifest, Value
from cgbundle.format.table import RECORDING, Table, unpack
from cgbundle.validate.manifest import check_manifest
from cgbundle.validate.module_state import Address
from cgbundle.validate.recordings import check_recording
from cgcompile.bundle import manifest_text
from cgcompile.bundle import recordings as codec
from cgcompile.bundle.recordings import MemcpyNode, MemsetNode, pack
from tests.helpers.bundles.edits import OF_ENTRY, edited
from tests.helpers.bundles.fabricate import seal_plain, seal_text
from tests.helpers.bundles.tiny_bundle import manifest
from tests.helpers.frugal import cost
from tests.helpers.places import ROOT
from tests.helpers.raising import raises

SECONDS, MEGABYTES = 1.0, 300
SLACK = 3.0
"""Factor on times: test machines are shared, and their processors differ."""


# --- hostile manifests -----------------------------------------------------------------------------------------------


Edit = Callable[[dict[str, Any]], Any]


def put(value: Any, *path: Any) -> Edit:
    def edit(plain: Any) -> None:
        plain = plain["entries"][0] if path[0] in OF_ENTRY else plain
        for part in path[:-1]:
            plain = plain[part]
        plain[path[-1]] = value

    return edit


def spelled(text: str, *path: Any) -> tuple[str, Edit]:
    """Returns an edit that writes JSON which `json.dumps` cannot write."""
    return text, put("@", *path)


def deep(depth: int) -> str:
    return "[" * depth + "7" + "]" * depth


def wide(kind: str) -> str:
    """Returns a size of 3.3 MB: a balanced tree of one operator."""
    level = '"batch"'
    while len(level) < 3_300_000:
        level = f'["{kind}",{level},{level}]'
    return level


def many_states(plain: dict[str, Any]) -> None:
    """Adds 20,000 buffers of one element that calls change. The last one has a defect."""
    row = {**plain["weights"][0], "shape": [1], "strides": [1], "memory": "state"}
    plain["weights"] += [{**row, "name": f"s{i}", "tensor": f"s{i}", "offset": 256 * i} for i in range(20_000)]
    plain["memories"] = [["weights", 32], ["state", 256 * 20_000 - 252]]
    plain["entries"][0]["dimensions"][0].update(pad="no", chunk=False)
    plain["files"][0]["bytes"] = -1


def many_dimensions(plain: dict[str, Any]) -> None:
    plain["entries"][0]["dimensions"] = [{**plain["entries"][0]["dimensions"][0], "name": f"d{i}"} for i in range(2000)]


def many_evaluations(plain: dict[str, Any]) -> None:
    size: Any = "batch"
    for _ in range(60):
        size = ["+", size, 1]
    plain["entries"][0]["outputs"] = [
        {**plain["entries"][0]["outputs"][0], "name": f"y{i}", "shape": [size] * 60, "order": list(range(60))} for i in range(8)
    ]
    plain["entries"][0]["dimensions"][0]["sizes"] = list(range(1, 3001))
    plain["entries"][0]["programs"] = [{**plain["entries"][0]["programs"][0], "key": [i]} for i in range(1, 3001)]
    plain["entries"][0]["dimensions"][0]["chunk"] = False
    plain["entries"][0]["result"] = {"tuple": [{"tensor": i} for i in range(8)]}


def table_file(plain: dict[str, Any]) -> None:
    plain["files"][0].update(path="graphs/x.bin", bytes=4 << 30)
    plain["module_state"] = "graphs/x.bin"


def tree(depth: int) -> str:
    return '{"dict":[["key",' * depth + '{"tensor":0}' + "]]}" * depth


HOSTILE: dict[str, tuple[Edit | tuple[str, Edit], str]] = {
    "a list 980 deep": (spelled(deep(980), "name"), "nested too deeply"),
    "a list 240 deep": (spelled(deep(240), "name"), "name: expected str, got list of 1"),
    "a size of lists 980 deep": (spelled(deep(980), "inputs", 0, "shape"), "nested too deeply"),
    "a format version 240 deep": (spelled(deep(240), "version"), "version: expected a version number, got of 1"),
    "a path of 5,000 letters": (put("x" * 5000, "files", 0, "path"), r"files\[0\].path: 5000 characters, more than the limit"),
    "a path with a part of 300 letters": (put("x" * 300, "files", 0, "path"), r"files\[0\].path: .* is no path inside"),
    "a path of 5,000 letters in a step": (put("x" * 5000, "programs", 0, "steps", 0, "file"), "5000 characters"),
    "a path of 5,000 letters in a region": (put("x" * 5000, "regions", 0, "file"), "5000 characters"),
    "a number of 400 digits": (put(10**400, "target", "driver"), "expected an integer of 64 bits, got int of 1329 bits"),
    "a number of 65 bits": (put(2**64, "programs", 0, "arena"), "expected an integer of 64 bits"),
    "a size of 65 bits": (put([2**64, 3], "inputs", 0, "shape"), "expected an integer of 64 bits"),
    "a size of 64 bits": (put(2**63 - 1, "programs", 0, "values", 0, "shape", 0), "more bytes than 64 bits count"),
    "a version of 4,000 digits": (put(10**4000, "version"), "version: expected a version number, got of 13288 bits"),
    "digits that are none": (put("²", "inputs", 0, "shape", 0), r"unknown dimension \['²'\]"),
    "a surrogate in a name": (put("\ud800", "inputs", 0, "name"), r"inputs\[0\].name: .* is not printable"),
    "a surrogate in a text": (put("\ud800", "dimensions", 0, "reason"), "half of a surrogate pair"),
    "a surrogate in a key": (put(1, "\ud800"), "no such field"),
    "a terminal's escape": (put("\x1b[31m", "name"), "name: .* is not printable"),
    "a line break in a name": (put("a\nb", "target", "arch"), "target.arch: .* is not printable"),
    "a text of a megabyte": (put("x" * 1_000_000, "regions", 0, "reason"), "1000000 characters, more than the limit"),
    "120,000 axes": (put([1] * 120_000, "inputs", 0, "shape"), "120000 axes, more than the limit of 64"),
    "72 axes": (put([1] * 72, "programs", 0, "values", 0, "shape"), "72 axes, more than the limit of 64"),
    "an order of 72 axes": (put(list(range(72)), "inputs", 0, "order"), "72 axes, more than the limit of 64"),
    "3.3 MB of // in a size": (spelled(wide("//"), "inputs", 0, "shape", 0), "more than 256 operators"),
    "3.3 MB of // in a name": (put("//" * 1_650_000, "inputs", 0, "shape", 0), "3300000 characters, more than the limit"),
    "a size of 70 operators in each other": (
        spelled('["+",1,' * 70 + "1" + "]" * 70, "inputs", 0, "shape", 0), r"inputs\[0\].shape\[0\]: nested too deeply"
    ),
    "20,000 state weights": (many_states, r"files\[0\].bytes: -1"),
    "2,000 dimensions": (many_dimensions, "dimensions: 2000, more than the limit of 64"),
    "sizes times int_keys": (many_evaluations, "programs: 3000 of .* more than the limit of 4000000 in all"),
    "a tree 70 deep": (spelled(tree(70), "result"), "nested too deeply"),
    "a tree 900 deep": (spelled(tree(900), "result"), "nested too deeply"),
    "a constant of 400 digits": (put({"call": [["x", {"tensor": 0}], ["n", {"value": 10**400}]]}, "call"), "n: .* of 1329 bits"),
    "a tensor of 400 digits": (put({"tensor": 10**400}, "result"), "result: names the tensors of 1329 bits"),
    "a constant that is half a letter": (put({"call": [["x", {"tensor": 0}], ["n", {"value": "\ud800"}]]}, "call"), "surrogate"),
    "a key that drives a terminal": (put({"dict": [["\x1b[2J", {"tensor": 0}]]}, "result"), r"the key '\\x1b\[2J' is neither"),
    "a key of a megabyte": (put({"dict": [["x" * 1_000_000, {"tensor": 0}]]}, "result"), "neither a printable name"),
    "a named tuple of 5,000 fields": (
        put({"namedtuple": ["T", [f"f{i}" for i in range(5000)], [{"value": 0}] * 5000]}, "result"), "'namedtuple' is no structure"
    ),
    "long keys on every level of a wide tree": (
        put({"dict": [["k" * 1000, {"dict": [["k" * 1000, {"list": [{"value": 0}] * 100_000}]]}]]}, "result"), "names the tensors"
    ),
    "a table of 4 GiB": (table_file, r"files\[0\].bytes: a table of 4294967296 bytes, more than the limit"),
}  # fmt: skip


def sealed(change: Edit | tuple[str, Edit]) -> bytes:
    text, edit = change if isinstance(change, tuple) else ("", change)
    base = replace(manifest(), files=(archive.File(path="program.pt2", bytes=1, sha256="0" * 64),))
    plain = json.loads(manifest_text.encode(base))
    edit(plain)
    if not text:
        return seal_plain(plain)
    whole = seal_plain(plain).decode()
    whole = whole.replace(json.loads(whole)["sha256"], "0" * 64)
    return seal_text(whole.replace('"@"', text))


def verdict(work: Callable[[], object]) -> str:
    try:
        work()
    except CgbundleError as error:
        text = str(error)
        assert text.isprintable() and len(text) <= 2100, text[:200]
        (text + error.hint).encode()
        return f"{error.code}: {text}"
    return "accepted"


def checked(data: bytes) -> None:
    check_manifest(manifest_json.decode(data))


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused_in_one_line(what: str) -> None:
    edit, expected = HOSTILE[what]
    data = sealed(edit)
    message, seconds, grown = cost(lambda: verdict(lambda: checked(data)))
    assert re.search(f"^manifest-invalid: .*{expected}", message), message
    assert seconds < SECONDS * SLACK and grown < MEGABYTES, (seconds, grown)


TEXTS: dict[str, Callable[[], bytes]] = {
    "33 MB of {},": lambda: b"[" + b"{}," * (11 << 20) + b"7]",
    "30 MB of {},": lambda: b"[" + b"{}," * (10 << 20) + b"7]",
    "objects, as many as may be": lambda: b"[" + b'{"":1},' * (limits.JSON_VALUES // 2 - 2) + b"7]",
    "texts, as many as may be": lambda: b"[" + b'"\xc4\x80b",' * (limits.JSON_VALUES - 2) + b"7]",
    "lists, as many as may be": lambda: b"[" + b"[]," * (limits.JSON_VALUES // 2 - 2) + b"7]",
    "a text of 32 MB": lambda: b'["' + b"x" * (limits.JSON_BYTES - 4) + b'"]',
    "32 MB of escapes": lambda: b'["' + b"\\n" * (limits.JSON_BYTES // 2 - 4) + b'"]',
    "32 MB of brackets in texts": lambda: b'["' + b"]" * (limits.JSON_BYTES - 4) + b'"]',
    "5 million texts of a bracket": lambda: b"[" + b'"]"' * 5_000_000 + b"]",
    "a list a million deep": lambda: b"[" * 1_000_000 + b"]" * 1_000_000,
    "a list a million deep that hides it": lambda: b'[1,"]",' * 300_000 + b"7" + b"]" * 300_000,
    "an object that is never closed": lambda: b'{"a":' * 1_000_000,
    "numbers of 4,000 digits": lambda: b"[" + (b"9" * 4000 + b",") * 8000 + b"7]",
    "a number of 30 million digits": lambda: b"[" + b"9" * 30_000_000 + b"]",
}


@pytest.mark.parametrize("what", TEXTS)
def test_a_text_is_checked_before_it_is_parsed(what: str, tmp_path: Path) -> None:
    """Texts are checked as a manifest, and as the header of a safetensors file."""
    data = TEXTS[what]()
    (tmp_path / "manifest.json").write_bytes(data)
    with open(tmp_path / "w", "wb") as file:
        file.write(struct.pack("<Q", len(data)))
        file.write(data)
    del data

    def header() -> None:
        with open(tmp_path / "w", "rb") as file:
            read_header(file, "w")

    message, seconds, grown = cost(lambda: verdict(lambda: archive.read_manifest(str(tmp_path))))
    assert message.startswith("manifest-invalid: ") and seconds < SECONDS * SLACK and grown < MEGABYTES, (message, seconds, grown)
    message = verdict(header)
    assert message.startswith("weights-invalid: "), message


@pytest.mark.parametrize("name", ["manifest.json", "w"])
def test_a_sparse_file_of_4_gib_is_refused_unread(name: str, tmp_path: Path) -> None:
    with open(tmp_path / name, "wb") as file:
        file.write(struct.pack("<Q", (4 << 30) - 8))
        file.truncate(4 << 30)

    def work() -> None:
        if name == "manifest.json":
            archive.read_manifest(str(tmp_path))
        with open(tmp_path / name, "rb") as file:
            read_header(file, "w")

    message, seconds, grown = cost(lambda: verdict(work))
    assert "more than the limit" in message and seconds < SECONDS and grown < MEGABYTES, (message, seconds, grown)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        (b"", 0), (b"7", 0), (b"[]", 1), (b'{"a":[{"b":[]}]}', 4), (b'["[[[["]', 1), (b'["]]]]",[[]]]', 3), (b'["\\"[[[["]', 1),
        (b'["\\\\",[["x"]]]', 3), (b'["[","{","]"]', 1), (b'["a","b","c"]', 1), (b'["","",[""]]', 2), (b'[["]"],["]"]]', 2),
    ],
)  # fmt: skip
def test_brackets_in_texts_are_no_depth(text: bytes, depth: int) -> None:
    assert limits.depth(text) == depth


@pytest.mark.parametrize("room", [60, 120, 250, 500])
def test_a_caller_that_is_deep_in_its_stack_gets_a_line_of_ours(room: int) -> None:
    """Only `room` frames are left before Python's recursion limit. The second manifest is valid (without files) and may be read."""
    messages: list[str] = []
    datas = [sealed(spelled(text, "result")) for text in (deep(200), tree(60), deep(980))]

    def down(frames: int) -> None:
        if frames:
            down(frames - 1)
            return
        messages.extend([verdict(partial(checked, data)) for data in datas])

    used = 0
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        used += 1
    down(sys.getrecursionlimit() - used - room)
    assert len(messages) == 3 and messages[0].startswith("manifest-invalid: ") and "nested too deeply" in messages[2], messages
    assert messages[1].startswith("file-damaged: " if room >= 400 else ("file-damaged: ", "manifest-invalid: ")), messages


def test_numbers_are_bounded_where_pythons_own_limit_is_off() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        with raises("manifest-invalid", match="a number of more than 4300 digits"):
            manifest_json.decode(b"[" + b"9" * 1_000_000 + b"]")
    finally:
        sys.set_int_max_str_digits(before)


# --- what real bundles need ------------------------------------------------------------------------------------------


def large(keys: int, values: int, weights: int) -> Manifest:
    """Returns a manifest with these numbers of int_keys, of values for each, and of weights."""
    base = manifest()
    row = Value(dtype="bfloat16", shape=(128, 4096, 64), strides=(262144, 64, 1), memory="arena", offset=123456789)
    programs = tuple([replace(base.entries[0].programs[0], key=(key + 1,), values=(row,) * values) for key in range(keys)])
    proofs = tuple([replace(base.entries[0].self_test.proofs[0], key=(key + 1,)) for key in range(keys)])
    names = tuple([replace(base.weights[0], name=f"model.layers.{i}.attention.weight") for i in range(weights)])
    return edited(base, programs=programs, weights=names, self_test=replace(base.entries[0].self_test, proofs=proofs))


@pytest.mark.parametrize(("keys", "values", "weights"), [(400, 4, 600), (10, 60, 5000)])
def test_what_large_models_need_is_far_below_the_limits(keys: int, values: int, weights: int) -> None:
    """Ten thousand int_keys with four values each need a twentieth of the limits. 100 int_keys with sixty values each and 50,000
    weights need a tenth."""
    data = manifest_text.encode(large(keys, values, weights))
    assert len(data) < limits.JSON_BYTES / 20
    assert data.count(b",") + data.count(b"[") + data.count(b"{") < limits.JSON_VALUES / 20
    assert len(manifest_json.decode(data).entries[0].programs) == keys


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(14))
@pytest.mark.parametrize("count", [limits.TABLE_BYTES + 1, 1 << 32, (1 << 64) - 1])
def test_a_count_beyond_the_limit_is_refused_before_anything_is_made_of_it(place: int, count: int) -> None:
    empty = codec.encode(codec.Recording(key=(), functions=(), nodes=(), edges=()))
    data = bytearray(empty)
    data[24 + 8 * place : 32 + 8 * place] = count.to_bytes(8, "little")
    with raises("table-invalid", match=f"table: {count} .*, more than the limit of"):
        unpack(RECORDING, data, "table")


def test_a_table_of_many_nodes_is_read_in_little_memory() -> None:
    """An eighth of the permitted rows takes less than 60 MB; with all rows, reading may take 400 MB."""
    nodes = limits.TABLE_ROWS // 8
    counts = dict.fromkeys(RECORDING.counts, 0) | {"nodes": nodes, "edges": nodes}
    contents: dict[str, Any] = {column.name: [0] * bool(column.bounds) for column in RECORDING.columns}
    contents |= {"kind": bytes(nodes), "edge_source": range(nodes), "edge_target": [*range(1, nodes), 0]}
    contents |= {name: bytes(nodes) for name in ("edge_from_port", "edge_to_port", "edge_type")}
    data = pack(RECORDING, counts, contents)

    def work() -> None:
        check_recording(Table(data), {}, ())

    message, seconds, grown = cost(lambda: verdict(work))
    assert "nodes lie on or behind a cycle" in message and seconds < SLACK and grown < 60, (message, seconds, grown)


@pytest.mark.parametrize("kind", ["memsets", "memcpys"])
def test_a_table_of_many_copies_is_checked_in_little_time(kind: str) -> None:
    """A search for the path of every copy would take a minute."""
    place = Address(memory=3, offset=0)
    set_: Any = MemsetNode(target=place, value=0, element=1, width=8, height=1, pitch=0)
    size = {"width": 8, "height": 1, "depth": 1, "source_pitch": 0, "source_height": 0, "target_pitch": 0, "target_height": 0}
    node = set_ if kind == "memsets" else MemcpyNode(source=place, target=place, **size)
    data = codec.encode(codec.Recording(key=(), functions=(), nodes=(node,) * 30_000, edges=()))

    def work() -> str:
        check_recording(Table(data), {"arena": 8}, ())
        return "sound"

    outcome, seconds, _ = cost(work)
    assert outcome == "sound" and seconds < SLACK, (outcome, seconds)


def test_the_writer_is_held_to_the_same_limits() -> None:
    nodes = (codec.EmptyNode(),) * (limits.TABLE_ROWS + 1)
    with raises("table-invalid", match="more than the limit of"):
        codec.encode(codec.Recording(key=(), functions=(), nodes=nodes, edges=()))


# --- errors, and the page --------------------------------------------------------------------------------------------


def test_the_message_of_an_error_about_a_bundle_is_a_printable_line() -> None:
    error = BundleError("manifest-invalid", "a\nb\x1b[31m\ud800" + "x" * 100_000 + "end")
    assert str(error).startswith(r"a b\x1b[31m\ud800xxx") and str(error).endswith("xend") and len(str(error)) < 2100
    assert str(BundleError(error.code, str(error))) == str(error)
    assert len(str(BundleError("manifest-invalid", "\U000e0001" * 1900))) < 2100
    assert str(CallError("input-structure", "a\x07b\u202e")) == r"a\x07b\u202e"


def test_format_md_lists_the_limits_of_the_code() -> None:
    """The rows `| what | number | `limits.NAME` |` of its table are exactly those of the module."""
    page = (ROOT / "bundles/FORMAT.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]+\| ([^|]+) \| `([A-Z_]+)` \|$", page, re.MULTILINE)
    stated = {name: number(text) for text, name in rows}
    assert stated == {name: value for name, value in vars(limits).items() if name.isupper() and not name.startswith("_")}


def number(text: str) -> int:
    """Reads `32 MiB`, `1,500,000` or `2^63`."""
    words = text.replace(",", "").split()
    if "^" in words[0]:
        base, power = words[0].split("^")
        return int(base) ** int(power)
    return int(words[0]) << {"MiB": 20}.get(words[1] if len(words) > 1 else "", 0)


def test_a_tree_of_a_call_is_checked_as_that_of_a_result() -> None:
    with raises("manifest-invalid", match="nested too deeply"):
        pytree.check_call({"call": [["x", json.loads(tree(70))]]}, 1)
