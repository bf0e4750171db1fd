"""The manifest's bytes are canonical and sealed. An error in decoding gives the path of the wrong value."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgbundle.errors import CgbundleError
from cgbundle.format import limits, manifest_json, schema
from cgbundle.format.schema import Manifest
from cgcompile.bundle import manifest_text
from tests.helpers.bundles.edits import OF_ENTRY, edited, located
from tests.helpers.bundles.fabricate import seal_plain, seal_text
from tests.helpers.bundles.tiny_bundle import manifest
from tests.helpers.raising import raises

# --- manifests of every shape, from the schema's annotations ---------------------------------------------------

integers, counts = st.integers(-limits.INTEGER, limits.INTEGER - 1), st.integers(0, limits.INTEGER - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), max_size=8)
sizes = st.recursive(
    integers | texts,
    lambda inner: st.tuples(st.sampled_from(["+", "-", "*", "//", "%"]), inner, inner),
    max_leaves=4,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


NAMED: dict[str, st.SearchStrategy[Any]] = {
    "int": integers, "Position": counts, "Bytes": counts, "str": texts, "Name": texts, "bool": st.booleans(), "float": floats,
    "Error": floats.map(abs), "Dtype": st.sampled_from(list(schema.DTYPES)), "Memory": st.sampled_from(schema.MEMORIES),
    "Sha256": st.text("0123456789abcdef", min_size=64, max_size=64), "IntKey": st.lists(integers, max_size=2).map(tuple),
    "Shape": st.lists(integers, max_size=2).map(tuple), "Sizes": st.lists(sizes, max_size=2).map(tuple),
    "Tree": st.dictionaries(st.text(max_size=4), json_values, max_size=3),
}  # fmt: skip


def values_of(text: str) -> st.SearchStrategy[Any]:
    """Returns a strategy for the values of an annotation, a text as in the schema."""
    if text.endswith(" | None"):
        return st.none() | values_of(text.removesuffix(" | None"))
    if text in NAMED:
        return NAMED[text]
    kind, _, inside = text[: -1 if text.endswith("]") else None].partition("[")
    parts = inside.split(", ")
    if kind == "Literal":
        return st.sampled_from([part.strip("'\"") for part in parts])
    if kind == "tuple" and parts[-1] == "...":
        return st.lists(values_of(inside.removesuffix(", ...")), max_size=2).map(tuple)
    if kind == "tuple":
        return st.tuples(*map(values_of, parts))
    record = getattr(schema, text)
    return st.builds(record, **{field.name: values_of(str(field.type)) for field in fields(record)})


manifests = values_of("Manifest").map(lambda manifest: replace(manifest, version=schema.VERSION))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(manifests)
def test_decode_inverts_encode(manifest: Manifest) -> None:
    data = manifest_text.encode(manifest)
    assert manifest_json.decode(data) == manifest
    assert manifest_text.encode(manifest_json.decode(data)) == data


def test_equal_manifests_give_equal_bytes_whatever_the_order_of_keys() -> None:
    one = edited(manifest(), call={"a": {"x": 1, "y": 2}, "b": 3})
    other = edited(manifest(), call={"b": 3, "a": {"y": 2, "x": 1}})
    assert manifest_text.encode(one) == manifest_text.encode(other)


def test_every_field_of_the_manifest_has_a_line_of_its_own_in_sorted_order() -> None:
    lines = manifest_text.encode(manifest()).decode().split("\n")
    assert (lines[0], lines[-2:]) == ("{", ["}", ""])
    names = [line.partition(":")[0].strip('"') for line in lines[1:-2]]
    base = manifest()
    members = [field.name for field in fields(Manifest) if field.default is MISSING or getattr(base, field.name) != field.default]
    assert names == sorted([*members, "sha256"])


def test_the_bytes_are_those_that_format_md_describes() -> None:
    data = manifest_text.encode(manifest())
    assert data == seal_plain(json.loads(data))


def test_the_seal_is_the_hash_of_the_text_with_zeros_in_its_place() -> None:
    data = manifest_text.encode(manifest())
    seal = json.loads(data)["sha256"]
    assert data.count(seal.encode()) == 1
    assert sha256(data.replace(seal.encode(), b"0" * 64)).hexdigest() == seal


# --- damage ----------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_caught() -> None:
    whole = manifest_text.encode(manifest())
    for position in range(len(whole)):
        for bit in (position % 8, (position + 5) % 8):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            with pytest.raises(CgbundleError):
                manifest_json.decode(bytes(data))


def test_every_truncation_is_caught() -> None:
    whole = manifest_text.encode(manifest())
    for length in range(len(whole)):
        with raises("manifest-invalid"):
            manifest_json.decode(whole[:length])


def test_added_bytes_are_caught() -> None:
    for data in (manifest_text.encode(manifest()) + b"\n", b" " + manifest_text.encode(manifest())):
        with raises("manifest-invalid"):
            manifest_json.decode(data)


def test_two_seals_are_refused() -> None:
    data = manifest_text.encode(manifest())
    line = data[data.index(b'\n"sha256"') : data.index(b"\n", data.index(b'\n"sha256"') + 1)]
    with raises("manifest-invalid", match="'sha256' occurs twice"):
        manifest_json.decode(data.replace(line, line + line))


@pytest.mark.parametrize("seal", [None, 7, "", "0" * 63, "\ud800", "x\ny"])
def test_a_seal_that_is_no_digest_is_refused(seal: object) -> None:
    plain = json.loads(manifest_text.encode(manifest())) | {"sha256": seal}
    with raises("manifest-invalid", match="sha256|SHA-256"):
        manifest_json.decode(json.dumps(plain).encode())


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe\x00", b"[]", b"7", b"null", b"{", b'{"version":NaN}', b"[" * 100_000, b"9" * 5000]
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with raises("manifest-invalid", match=r"^manifest\.json: "):
        manifest_json.decode(data)


def test_a_manifest_beyond_the_limit_is_refused_unread() -> None:
    with raises("manifest-invalid", match="more than the limit"):
        manifest_json.decode(bytes(limits.JSON_BYTES + 1))


def decode_edited(edit: Callable[[dict[str, Any]], None]) -> Manifest:
    plain = json.loads(manifest_text.encode(manifest()))
    edit(plain)
    return manifest_json.decode(seal_plain(plain))


def reject(edit: Callable[[dict[str, Any]], None], path: str, message: str) -> None:
    with raises("manifest-invalid", match=message) as caught:
        decode_edited(edit)
    assert str(caught.value).startswith(f"{located(path)}: ")
    assert "\n" not in str(caught.value)


def test_an_edit_that_changes_nothing_is_accepted() -> None:
    assert decode_edited(lambda plain: None) == manifest()


@pytest.mark.parametrize("version", [schema.VERSION + 1, schema.VERSION + 2, 10**9])
def test_a_newer_format_version_names_both_versions(version: int) -> None:
    words = f"version {version} of the format, this cgbundle reads versions up to {schema.VERSION}$"
    with raises("format-unsupported", match=words) as caught:
        decode_edited(lambda plain: plain.update(version=version))
    assert caught.value.exit_code == 2


def test_a_newer_format_is_told_as_such_even_when_its_seal_and_fields_are_unknown_here() -> None:
    with raises("format-unsupported"):
        manifest_json.decode(b'{"version":%d,"something":"else"}' % (schema.VERSION + 1))


@pytest.mark.parametrize("version", [1, 2, 6, "6"])
def test_what_was_written_before_version_1_is_refused_in_one_sentence(version: object) -> None:
    with raises("format-unsupported", match=r"^manifest\.json: written before version 1 of the format; build the bundle again$"):
        decode_edited(lambda plain: (plain.update(format=version), plain.pop("version")))


def test_what_has_its_default_is_left_out_and_refused_where_it_stands() -> None:
    plain = json.loads(manifest_text.encode(manifest()))
    assert "world" not in plain and "mutated_inputs" not in plain["entries"][0]
    reject(put([], "mutated_inputs"), "mutated_inputs", "has its default value, which must be left out")
    reject(put(0, "weights", 0, "offset"), "weights[0].offset", "has its default")
    reject(put(None, "world"), "world", "expected World, got NoneType")
    reject(put(None, "random"), "random", "expected int, got NoneType")


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, [1]])
def test_a_format_version_that_is_no_number_from_1_on_is_refused(version: object) -> None:
    reject(lambda plain: plain.update(version=version), "version", "expected a version number")


def test_a_missing_format_version_is_refused() -> None:
    reject(lambda plain: plain.pop("version"), "version", "expected a version number")


def drop(plain: Any, *path: Any) -> None:
    plain = plain["entries"][0] if path[0] in OF_ENTRY else plain
    for part in path[:-1]:
        plain = plain[part]
    del plain[path[-1]]


def put(value: object, *path: Any) -> Callable[[Any], None]:
    def edit(plain: Any) -> None:
        plain = plain["entries"][0] if path[0] in OF_ENTRY else plain
        for part in path[:-1]:
            plain = plain[part]
        plain[path[-1]] = value

    return edit


def test_a_missing_field_names_its_path() -> None:
    reject(lambda plain: drop(plain, "name"), "name", "missing")
    reject(lambda plain: drop(plain, "target", "arch"), "target.arch", "missing")
    reject(lambda plain: drop(plain, "programs", 1, "values", 0, "dtype"), "programs[1].values[0].dtype", "missing")


def test_an_unknown_field_names_its_path() -> None:
    reject(put(1, "colour"), "colour", "no such field in this format version")
    reject(put(1, "programs", 1, "steps", 0, "colour"), "programs[1].steps[0].colour", "no such field")


def test_the_name_of_an_unknown_field_cannot_break_the_line() -> None:
    with raises("manifest-invalid", match="no such field") as caught:
        decode_edited(put(1, "target", "two\nlines\x1b[2J"))
    assert str(caught.value).isprintable() and str(caught.value).startswith("target.")


@pytest.mark.parametrize(
    ("edit", "path", "expected"),
    [
        (put(7, "name"), "name", "expected str, got int '7'"),
        (put("7", "target", "driver"), "target.driver", "expected int, got str '7'"),
        (put(True, "target", "driver"), "target.driver", "expected int, got bool"),
        (put(1.0, "target", "driver"), "target.driver", "expected int, got float"),
        (put(1, "dimensions", 0, "chunk"), "dimensions[0].chunk", "expected bool, got int"),
        (put("1", "self_test", "proofs", 1, "error"), "self_test.proofs[1].error", "expected number, got str"),
        (put(True, "self_test", "proofs", 1, "error"), "self_test.proofs[1].error", "expected number, got bool"),
        (put([], "target"), "target", "expected Target, got list"),
        (put({}, "programs"), "programs", "expected a list, got dict"),
        (put("ab", "programs", 0, "key"), "programs[0].key", "expected a list, got str"),
        (put([["weights"]], "memories"), "memories[0]", "expected 2 values, got list"),
        (put([["weights", "1"]], "memories"), "memories[0][1]", "expected int, got str"),
        (put([["a", 1, 2]], "regions", 0, "constants"), "regions[0].constants[0]", "expected 2 values"),
        (put([1.5], "inputs", 0, "shape"), "inputs[0].shape[0]", "expected a size, got float"),
        (put([["^", 1, 2]], "inputs", 0, "shape"), "inputs[0].shape[0]", "expected a size, got list"),
        (put([["+", 1, None]], "inputs", 0, "shape"), "inputs[0].shape[0][2]", "expected a size, got NoneType"),
        (put([True], "inputs", 0, "shape"), "inputs[0].shape[0]", "expected a size, got bool"),
        (put([], "call"), "call", "expected an object, got list"),
        (put(None, "files", 0), "files[0]", "expected File, got NoneType"),
    ],
)
def test_a_wrong_type_names_its_path_and_both_types(edit: Callable[[Any], None], path: str, expected: str) -> None:
    if path.startswith("files"):
        with_file = replace(manifest(), files=(schema.File(path="a", bytes=0, sha256=""),))
        plain = json.loads(manifest_text.encode(with_file))
        edit(plain)
        with raises("manifest-invalid") as caught:
            manifest_json.decode(seal_plain(plain))
        assert str(caught.value).startswith(f"{path}: {expected}")
    else:
        reject(edit, path, expected)


def test_a_whole_number_is_a_number() -> None:
    number = decode_edited(put(2, "self_test", "proofs", 0, "tolerance")).entries[0].self_test.proofs[0].tolerance
    assert type(number) is float and number == 2


# --- hostile numbers and depths ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400])
def test_a_number_that_no_float_holds_is_refused(number: str) -> None:
    """With an infinite tolerance every self-test would pass."""
    plain = json.loads(manifest_text.encode(manifest()))
    plain["entries"][0]["self_test"]["proofs"][0]["tolerance"] = 0.123
    text = seal_plain(plain).decode().replace("0.123", number)
    text = text.replace(json.loads(seal_plain(plain))["sha256"], "0" * 64)
    with raises("manifest-invalid", match=r"self_test\.proofs\[0\]\.tolerance|not JSON"):
        manifest_json.decode(seal_text(text))


@pytest.mark.parametrize("number", ["1e999", "NaN"])
def test_a_constant_that_no_float_holds_is_refused(number: str) -> None:
    plain = json.loads(manifest_text.encode(manifest()))
    plain["entries"][0]["call"] = {"call": [["x", {"value": 0.123}]]}
    text = seal_plain(plain).decode().replace("0.123", number)
    text = text.replace(json.loads(seal_plain(plain))["sha256"], "0" * 64)
    with raises("manifest-invalid"):
        manifest_json.decode(seal_text(text))


def test_numbers_that_json_cannot_hold_are_refused_when_written() -> None:
    for number in (float("inf"), float("nan")):
        with raises("manifest-invalid", match="cannot hold the number"):
            manifest_text.encode(edited(manifest(), call={"value": number}))


@pytest.mark.parametrize("depth", [70, 200, 500, 900])
def test_a_size_nested_too_deeply_is_refused(depth: int) -> None:
    size: Any = "batch"
    for _ in range(depth):
        size = ["+", size, 1]
    with raises("manifest-invalid"):
        decode_edited(put([size, 3], "inputs", 0, "shape"))


def test_a_size_may_nest_as_deep_as_any_model_needs() -> None:
    size: Any = "batch"
    for _ in range(30):
        size = ["+", size, 1]
    assert decode_edited(put([size, 3], "inputs", 0, "shape")).entries[0].inputs[0].shape[1] == 3
