"""JSON of a bundle has one meaning: no duplicate names and no infinite numbers, at any depth."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.format import limits, manifest_json
from cgbundle.format.safetensors import read_header
from cgbundle.validate import host_code
from cgcompile.bundle import manifest_text
from tests.helpers.bundles.tiny_bundle import manifest
from tests.helpers.raising import raises

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_what_is_written_is_read(value: object) -> None:
    assert limits.parse(json.dumps(value).encode()) == value


@pytest.mark.parametrize("around", ["%s", "[%s]", '{"x":%s}', '{"x":[1,{"y":%s}],"z":2}'])
@pytest.mark.parametrize("pair", ['"a":1,"a":1', '"a":1,"b":2,"a":3', r'"a":1,"\u0061":2', '"":{},"":[]', '"é":1,"\\u00e9":2'])
def test_a_name_that_stands_twice_is_refused_at_any_depth(pair: str, around: str) -> None:
    with pytest.raises(ValueError, match="occurs twice in an object"):
        limits.parse((around % f"{{{pair}}}").encode())


def test_names_in_two_objects_and_in_texts_are_no_repetition() -> None:
    assert limits.parse(b'[{"a":1},{"a":{"a":"\\"a\\":1,\\"a\\":2"}}]') == [{"a": 1}, {"a": {"a": '"a":1,"a":2'}}]


def test_a_repetition_among_many_names_takes_no_time_by_their_square() -> None:
    names = ",".join([f'"n{number}":0' for number in range(200_000)])
    with pytest.raises(ValueError, match="'n7' occurs twice"):
        limits.parse(f'{{{names},"n7":0}}'.encode())


@pytest.mark.parametrize(
    "number",
    ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1E+400", "9" * 5000, f"-{'9' * 5000}", "0x1", "01", "+1", ".5", "1_0"],
)
def test_numbers_that_are_none_are_refused(number: str) -> None:
    for text in (number, f"[{number}]", f'{{"a":{number}}}'):
        with pytest.raises(ValueError, match="not JSON|Exceeds|not allowed"):
            limits.parse(text.encode())


def sealed(text: bytes) -> bytes:
    """Returns the manifest with a new hash of itself, as an attacker would write it."""
    digest = json.loads(text)["sha256"].encode()
    zeros = text.replace(b'\n"sha256":"' + digest, b'\n"sha256":"' + b"0" * 64)
    return zeros.replace(b'\n"sha256":"' + b"0" * 64, b'\n"sha256":"' + hashlib.sha256(zeros).hexdigest().encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{\n"entries"', b'{\n"name":"another",\n"entries"'),
        (b'{\n"entries"', b'{\n"version":1,\n"entries"'),
        (b'"pad":', b'"pad":"rows","pad":'),
        (b'"call":{', b'"call":{"value":1,"value":2,'),
        (b'{\n"entries"', b'{\n"\\u0073ha256":"' + b"0" * 64 + b'",\n"entries"'),
    ],
)
def test_a_field_of_a_manifest_stands_once(old: bytes, new: bytes) -> None:
    text = manifest_text.encode(manifest())
    assert manifest_json.decode(sealed(text)) == manifest() and text.count(old) >= 1
    with raises("manifest-invalid", match=r"manifest\.json: not JSON: '\w+' occurs twice in an object"):
        manifest_json.decode(sealed(text.replace(old, new, 1)))


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        '{"__metadata__":{"x":"1","x":"2"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    ],
)
def test_a_name_in_a_header_of_tensors_stands_once(header: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"!")
    with open(tmp_path / "f", "rb") as file, raises("weights-invalid", match="occurs twice in an object"):
        read_header(file, "f")


@pytest.mark.parametrize("code_rows", [b"[" * 100_000, b'{"calls":1,"calls":2}', b'{"calls":NaN}', b"\xff", b"[]", b""])
def test_rows_of_code_that_are_no_json_differ_in_nothing_that_is_named(code_rows: bytes) -> None:
    assert host_code.difference(code_rows, b'{"calls":[]}') == ""
