"""Mutations of a bundle's files, drawn from a `random.Random`. The functions return new data and change no file, except `planted`.

Hashes are recomputed afterwards (`seal`), so that later checks are reached.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import struct
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from cgbundle.errors import CgbundleError
from cgbundle.format.schema import MEMORIES
from cgbundle.format.table import BRANCHING, RECORDING, unpack
from cgbundle.validate.module_state import STATES, Address
from cgcompile.bundle.recordings import MemcpyNode, MemsetNode, Node, decode, encode, pack

INTEGERS = (
    0, 1, -1, 2, 3, 7, 8, 16, 63, 64, 65, 72, 127, 128, 255, 256, 4096, 65535, 1 << 20, 2**31 - 1, 2**31, 2**32, 10**9, 2**40,
    2**62, 2**63 - 1, 2**63, 2**64, 2**64 + 1, -(2**31), -(2**63), 10**30, 10**400,
)  # fmt: skip
"""Integers at the limits of types and of the format."""

TEXTS = (
    "", " ", "-", "x", "..", "/", "/etc/passwd", "../weights.safetensors", "a\x00b", "\x1b[31m", "²", "\ud800", "batch", "seq",
    "2*batch", "batch//2", "float32", "float64", "int64", "bool", "complex64", "bfloat16", "weights", "state", "inputs", "arena",
    "host", "code", "graph", "copy", "cpu", "cuda", "rows", "no", "zeros", "host/model.so", "weights.safetensors",
    "graphs/modules.bin", "9" * 5000, "x" * 5000, "//" * 3000, "\u202e", "\x9b2J", "ﬁ", "é", "\U0001f600", "None", "lambda", "a\nb",
    "<script>", '"', "'", "\\", "]", "[" * 300, "%s{}", "x" * 1024, "\udcff",
)  # fmt: skip
"""Texts that are valid in some other field, or in none."""

OTHERS: tuple[Any, ...] = (None, True, False, 0.5, -0.0, 1e308, [], {}, [[]], [0], "x", {"x": 0}, [None])

NUMBER = re.compile(rb"(?<=[:,\[])-?[0-9]+(?=[,\]}])")

INSERTED = (
    b"9" * 5000, b"1e999", b"NaN", b"-0", b"1.0", b"01", b"[" * 980 + b"]" * 980, b"[" * 300, b'{"a":' * 200 + b"0" + b"}" * 200,
    b"[" + b"{}," * 20_000 + b"0]", b'["+",' * 70 + b"1" + b",1]" * 70, b"[" + b"1," * 120_000 + b"1]", b'"' + b"/" * 70_000 + b'"',
    b'"\\ud800"', b'"\\u0000"', b'"\xff"', b"tru", b'"' + b"\\\\" * 30_000 + b'"',
)  # fmt: skip
"""Texts that replace a number in a manifest."""


def manifest(plain: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Returns a copy of a decoded manifest with one to three changes."""
    changed: dict[str, Any] = json.loads(json.dumps(plain))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        _change(changed, draw)
    return changed


def swapped(plain: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Returns a copy in which values of one type are swapped once or twice, mostly between fields of the same name."""
    changed: dict[str, Any] = json.loads(json.dumps(plain))
    for _ in range(draw.choice((1, 1, 2))):
        places = list(_places(changed))
        tree, key = draw.choice(places)
        kind, same_key = type(tree[key]), draw.random() < 0.7
        others = [(one, other) for one, other in places if type(one[other]) is kind and (not same_key or other == key)]
        other, place = draw.choice(others)
        if draw.random() < 0.5:
            tree[key], other[place] = deepcopy(other[place]), deepcopy(tree[key])  # one may contain the other
        else:
            tree[key] = deepcopy(other[place])
    return changed


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (container, key) of everything in a JSON value."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def _change(tree: Any, draw: random.Random) -> None:
    """Changes one value inside a JSON value, which a random walk selects."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            if isinstance(tree, list):
                tree.append(_other(draw))
            return
        key = draw.choice(keys)
        inner = tree[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.9:
            tree = inner
            continue
        _replace(tree, key, draw)
        return


def _replace(tree: Any, key: Any, draw: random.Random) -> None:
    old, chance = tree[key], draw.random()
    if chance < 0.06:
        del tree[key]
    elif chance < 0.12 and isinstance(tree, list):
        tree[key:key] = [deepcopy(old) for _ in range(draw.choice((1, 1, 2, 100)))]
    elif chance < 0.18 and isinstance(tree, list):
        draw.shuffle(tree)
    elif chance < 0.22 and isinstance(tree, dict):
        tree[draw.choice(TEXTS)] = old
    elif chance < 0.25:
        tree[key] = _nested(old, draw.choice((2, 60, 500)))
    elif chance < 0.32:
        tree[key] = _other(draw)
    elif isinstance(old, bool):
        tree[key] = not old
    elif isinstance(old, int):
        tree[key] = draw.choice((old + 1, old - 1, old * 2, -old, old ^ 1, draw.choice(INTEGERS)))
    elif isinstance(old, float):
        tree[key] = draw.choice((0.0, -1.0, 1e-300, 1e300, old * 2, 1))
    elif isinstance(old, str):
        at = draw.randrange(len(old) + 1)
        inserted = old[:at] + draw.choice(TEXTS)[:8] + old[at:]
        tree[key] = draw.choice((old + "x", old[:-1], old.upper(), old[::-1], inserted, draw.choice(TEXTS)))
    else:
        tree[key] = deepcopy(draw.choice((*INTEGERS, *TEXTS, *OTHERS)))


def _other(draw: random.Random) -> Any:
    """Returns a copy, because later changes of the case may modify it."""
    return deepcopy(draw.choice(OTHERS))


def _nested(value: Any, depth: int) -> Any:
    """Nests the value in `depth` lists, unless it is deeply nested already: Python's json writes at most 990 levels."""
    if _depth(value) > 100:
        return value
    for _ in range(depth):
        value = [value]
    return value


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level := [
        child
        for container in level
        if isinstance(container, dict | list)
        for child in (container.values() if isinstance(container, dict) else container)
    ]:
        depth += 1
    return depth


def text(data: bytes, draw: random.Random) -> bytes:
    """Changes a manifest's text in ways that no dict can represent, and seals it: replaces a number, or repeats a field."""
    zeroed = _SEAL.sub(_EMPTY, data)
    if draw.random() < 0.9:
        match = draw.choice(list(NUMBER.finditer(zeroed)))
        zeroed = zeroed[: match.start()] + draw.choice(INSERTED) + zeroed[match.end() :]
    else:
        lines = zeroed.split(b",\n")
        zeroed = b",\n".join([*lines[:2], draw.choice(lines[1:-1]), *lines[2:]])
    return zeroed.replace(_EMPTY, b'\n"sha256":"' + hashlib.sha256(zeroed).hexdigest().encode() + b'"')


PAIR = re.compile(rb'\{\n?("[^"\\]*":)')
"""Matches the first name of an object in a JSON text."""


def twice(data: bytes, draw: random.Random) -> bytes:
    """Returns a sealed manifest or a safetensors file in which a name of an object occurs twice."""
    if data.startswith(b"{"):
        manifest_text = _twice(_SEAL.sub(_EMPTY, data), draw)
        return manifest_text.replace(_EMPTY, b'\n"sha256":"' + hashlib.sha256(manifest_text).hexdigest().encode() + b'"')
    size = int.from_bytes(data[:8], "little")
    header = _twice(data[8 : 8 + size], draw)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def _twice(text: bytes, draw: random.Random) -> bytes:
    match = draw.choice(list(PAIR.finditer(text)))
    return text[: match.end()] + draw.choice((b"0", b"[]", b'{"x":null}')) + b"," + match[1] + text[match.end() :]


def planted(folder: Path, folders: Sequence[str], draw: random.Random) -> Path:
    """Puts a file, folder, link or pipe that the manifest does not name into a folder of a bundle. Returns its path."""
    place = folder / draw.choice(folders) / draw.choice(("stranger", ".hidden", "weights.safetensors.old", "graph", "\udcff"))
    kind = draw.randrange(5)
    if kind == 0:
        place.write_bytes(b"PK")
    elif kind == 1:
        place.mkdir()
    elif kind == 2:
        os.mkfifo(place)
    else:
        place.symlink_to(draw.choice((".", "..", "/", "nowhere", place.name, "manifest.json")))
    return place


Row = tuple[int, int, int]
"""A range of bytes: memory, first byte, end."""


def writing(data: bytes, marks: Sequence[tuple[int, int]], draw: random.Random) -> tuple[bytes, list[Row]]:
    """Adds a memset or memcpy to a recording. Returns the recording and the ranges that the new node writes, as `Row`s. `marks` are
    (memory, offset) at which values begin or end."""
    recording = decode(data)
    memory, offset = draw.choice(marks)
    offset = max(0, offset + draw.choice((0, 0, -1, 1, -4, 4, -64, 256)))
    element = draw.choice((1, 1, 2, 4))
    width, height, depth = draw.choice((1, 4, 8, 60)), draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 1, 2))
    target = Address(memory=memory, offset=offset)
    if draw.random() < 0.5:
        depth, rows, pitch = 1, height, width * element + draw.choice((0, 4, 64)) * element
        node: Node = MemsetNode(target=target, value=1, element=element, width=width, height=height, pitch=pitch)
        width *= element
    else:
        rows, pitch = height + draw.choice((0, 1)), width + draw.choice((0, 3, 64))
        node = MemcpyNode(
            source=Address(memory=MEMORIES.index("arena"), offset=0), target=target, width=width, height=height, depth=depth,
            source_pitch=width, source_height=height, target_pitch=pitch, target_height=rows,
        )  # fmt: skip
    begins = [offset + (place * rows + row) * pitch for place in range(depth) for row in range(height)]
    return encode(replace(recording, nodes=(*recording.nodes, node))), [(memory, begin, begin + width) for begin in begins]


def table(data: bytes, draw: random.Random) -> bytes:
    """Changes a few bytes or words, or the length, of a table or another binary file."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        chance = draw.random()
        if not changed:
            return bytes(8)
        at = draw.randrange(len(changed))
        if chance < 0.3:
            changed[at] ^= 1 << draw.randrange(8)
        elif chance < 0.6:
            _put(changed, at & ~7, "<Q", draw.choice(INTEGERS))
        elif chance < 0.8:
            _put(changed, at & ~3, "<I", draw.choice(INTEGERS))
        elif chance < 0.9:
            other = draw.randrange(len(changed)) & ~7
            changed[at & ~7 : (at & ~7) + 8] = changed[other : other + 8]
        elif chance < 0.95:
            del changed[at:]
        else:
            changed += bytes(draw.choice((1, 8, 64, 4096)))
    return bytes(changed)


def columns(data: bytes, draw: random.Random) -> bytes:
    """Changes numbers in the columns of a table: to a neighbour, a limit, or a number of another column. The structure stays."""
    layout = STATES
    if data[:8] == RECORDING.magic:
        layout = BRANCHING if int.from_bytes(data[8:16], "little") == BRANCHING.version else RECORDING
    counts, views = unpack(layout, data, "table")
    contents = {name: view.tolist() for name, view in views.items()}
    filled = [column for column in layout.columns if contents[column.name]]
    for _ in range(draw.choice((1, 1, 2, 3))):
        column = draw.choice(filled)
        numbers = contents[column.name]
        row = draw.randrange(len(numbers))
        old, other = numbers[row], draw.choice(contents[draw.choice(filled).name])
        near = (old + 1, old - 1, old ^ 1, old * 2, old + 8, old + 256, numbers[row - 1], draw.choice(numbers))
        numbers[row] = draw.choice((*near, other, *counts.values(), draw.choice(INTEGERS)))
        most = 1 << {"B": 8, "I": 32, "i": 31, "q": 63, "Q": 64}[column.format]
        numbers[row] %= most
    try:
        return pack(layout, counts, contents)
    except CgbundleError:  # the column's type cannot hold the number
        return data


def _put(data: bytearray, at: int, form: str, value: int) -> None:
    word = struct.pack(form, value % (1 << (8 * struct.calcsize(form))))
    data[at : at + len(word)] = word[: max(0, len(data) - at)]


def tensors(data: bytes, draw: random.Random) -> bytes:
    """Changes the JSON header of a safetensors file. In three of four cases its length field is correct."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    (_change if draw.random() < 0.8 else _exchange)(header, draw)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    length = len(text) if draw.random() < 0.75 else draw.choice(INTEGERS) % 2**64
    return length.to_bytes(8, "little") + text + data[8 + size :]


def _exchange(header: dict[str, Any], draw: random.Random) -> None:
    one, other = draw.choice(list(header)), draw.choice(list(header))
    header[one], header[other] = header[other], header[one]


_SEAL = re.compile(rb'\n"sha256":"[0-9a-f]{64}"')
_EMPTY = b'\n"sha256":"' + b"0" * 64 + b'"'


def seal(plain: dict[str, Any], files: dict[str, bytes]) -> bytes:
    """Returns manifest.json with new hashes and lengths of the changed `files`, and its own new hash."""
    rows = plain.get("files")
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and isinstance(row.get("path"), str) and row["path"] in files:
            data = files[row["path"]]
            row["bytes"], row["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    fields = {**plain, "sha256": "0" * 64}
    lines = [f"{json.dumps(name)}:{json.dumps(fields[name], sort_keys=True, separators=(',', ':'))}" for name in sorted(fields)]
    text = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    return text.replace(_EMPTY, b'\n"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'"')
