"""The manifest's bytes: canonical, sealed, and decoded with the path of whatever is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from types import EllipsisType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgbundle.errors import CgbundleError
from cgbundle.format import limits, manifest_json, schema, versions
from cgbundle.format.schema import Manifest
from tests.helpers.bundles.fabricate import seal_plain, seal_text
from tests.helpers.bundles.tiny_bundle import before_4, manifest
from tests.helpers.raising import raises

# --- manifests of every shape, from the schema's annotations ---------------------------------------------------

scalars = {
    int: st.integers(-limits.INTEGER, limits.INTEGER - 1),
    str: st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), max_size=8),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
}
sizes = st.recursive(
    scalars[int] | scalars[str],
    lambda inner: st.tuples(st.sampled_from(["+", "-", "*", "//", "%"]), inner, inner),
    max_leaves=4,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | scalars[float] | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation of the schema."""
    if kind == schema.Size:
        return sizes
    if kind == schema.Tree:
        return st.dictionaries(st.text(max_size=4), json_values, max_size=3)
    if kind in scalars:
        return scalars[kind]
    if is_dataclass(kind):
        return st.builds(kind, **{name: values_of(hint) for name, hint in get_type_hints(kind).items()})
    assert get_origin(kind) is tuple, kind
    parts = get_args(kind)
    if isinstance(parts[-1], EllipsisType):
        return st.lists(values_of(parts[0]), max_size=2).map(tuple)
    return st.tuples(*map(values_of, parts))


manifests = values_of(Manifest).map(lambda made: replace(made, format=versions.FORMAT_VERSION))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(manifests)
def test_decode_inverts_encode(made: Manifest) -> None:
    data = manifest_json.encode(made)
    assert manifest_json.decode(data) == made
    assert manifest_json.encode(manifest_json.decode(data)) == data


def test_equal_manifests_give_equal_bytes_whatever_the_order_of_keys() -> None:
    one = replace(manifest(), call={"a": {"x": 1, "y": 2}, "b": 3})
    other = replace(manifest(), call={"b": 3, "a": {"y": 2, "x": 1}})
    assert manifest_json.encode(one) == manifest_json.encode(other)


def test_every_field_of_the_manifest_has_a_line_of_its_own_in_sorted_order() -> None:
    lines = manifest_json.encode(manifest()).decode().split("\n")
    assert (lines[0], lines[-2:]) == ("{", ["}", ""])
    names = [line.partition(":")[0].strip('"') for line in lines[1:-2]]
    left_out = {name for record, name in versions.SPARSE if record == "Manifest"}  # they are empty
    assert names == sorted([field.name for field in fields(Manifest) if field.name not in left_out] + ["sha256"])


def test_the_bytes_are_those_that_format_md_describes() -> None:
    data = manifest_json.encode(manifest())
    assert data == seal_plain(json.loads(data))


def test_the_seal_is_the_hash_of_the_text_with_zeros_in_its_place() -> None:
    data = manifest_json.encode(manifest())
    seal = json.loads(data)["sha256"]
    assert data.count(seal.encode()) == 1
    assert sha256(data.replace(seal.encode(), b"0" * 64)).hexdigest() == seal


# --- damage ----------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_caught() -> None:
    whole = manifest_json.encode(manifest())
    for position in range(len(whole)):
        for bit in (position % 8, (position + 5) % 8):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            with pytest.raises(CgbundleError):
                manifest_json.decode(bytes(data))


def test_every_truncation_is_caught() -> None:
    whole = manifest_json.encode(manifest())
    for length in range(len(whole)):
        with raises("manifest-invalid"):
            manifest_json.decode(whole[:length])


def test_added_bytes_are_caught() -> None:
    for data in (manifest_json.encode(manifest()) + b"\n", b" " + manifest_json.encode(manifest())):
        with raises("manifest-invalid"):
            manifest_json.decode(data)


def test_two_seals_are_refused() -> None:
    data = manifest_json.encode(manifest())
    line = data[data.index(b'\n"sha256"') : data.index(b"\n", data.index(b'\n"sha256"') + 1)]
    with raises("manifest-invalid", match="'sha256' stands twice"):
        manifest_json.decode(data.replace(line, line + line))


@pytest.mark.parametrize("seal", [None, 7, "", "0" * 63, "\ud800", "x\ny"])
def test_a_seal_that_is_no_digest_is_refused(seal: object) -> None:
    plain = json.loads(manifest_json.encode(manifest())) | {"sha256": seal}
    with raises("manifest-invalid", match="sha256|SHA-256"):
        manifest_json.decode(json.dumps(plain).encode())


@pytest.mark.parametrize("data", [b"", b"\xff\xfe\x00", b"[]", b"7", b"null", b"{", b'{"format":NaN}', b"[" * 100_000, b"9" * 5000])
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with raises("manifest-invalid", match=r"^manifest\.json: "):
        manifest_json.decode(data)


def test_a_manifest_beyond_the_limit_is_refused_unread() -> None:
    with raises("manifest-invalid", match="more than the limit"):
        manifest_json.decode(bytes(limits.JSON_BYTES + 1))


def decode_edited(edit: Callable[[dict[str, Any]], None]) -> Manifest:
    plain = json.loads(manifest_json.encode(manifest()))
    edit(plain)
    return manifest_json.decode(seal_plain(plain))


def reject(edit: Callable[[dict[str, Any]], None], path: str, message: str) -> None:
    with raises("manifest-invalid", match=message) as caught:
        decode_edited(edit)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_an_edit_that_changes_nothing_is_accepted() -> None:
    assert decode_edited(lambda plain: None) == manifest()


@pytest.mark.parametrize("version", [versions.FORMAT_VERSION + 1, versions.FORMAT_VERSION + 2, 10**9])
def test_a_newer_format_version_names_both_versions(version: int) -> None:
    words = f"version {version}, this cgbundle reads versions up to {versions.FORMAT_VERSION}$"
    with raises("format-unsupported", match=words) as caught:
        decode_edited(lambda plain: plain.update(format=version))
    assert caught.value.exit_code == 2


def test_a_newer_format_is_told_as_such_even_when_its_seal_and_fields_are_unknown_here() -> None:
    with raises("format-unsupported"):
        manifest_json.decode(b'{"format":%d,"something":"else"}' % (versions.FORMAT_VERSION + 1))


def test_an_earlier_version_lacks_the_fields_that_came_later() -> None:
    finding = schema.Finding(
        rule="r", severity="note", message="m", node="", where="", source="", effect="e", fix="f"
    )  # fmt: skip
    made = replace(before_4(manifest(), 1), findings=(finding,))
    plain = json.loads(manifest_json.encode(made))
    assert "written" not in plain and "node" not in plain["findings"][0]
    assert manifest_json.decode(manifest_json.encode(made)) == made
    with raises("manifest-invalid", match=r"^findings\[0\]\.node: no such field in this format version"):
        manifest_json.decode(seal_plain({**plain, "findings": [{**plain["findings"][0], "node": ""}]}))
    with raises("manifest-invalid", match="^written: missing"):
        manifest_json.decode(seal_plain({**plain, "format": 2}))
    with raises("manifest-invalid", match="^written: format version 1 has no such field"):
        manifest_json.encode(replace(made, written=(0,)))


def test_the_fields_that_came_later_exist() -> None:
    for (record, field), (since, _) in versions.ADDED.items():
        assert field in {each.name for each in fields(getattr(schema, record))} and 1 < since <= versions.FORMAT_VERSION


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, [1]])
def test_a_format_version_that_is_no_number_from_1_on_is_refused(version: object) -> None:
    reject(lambda plain: plain.update(format=version), "format", "expected a version number")


def test_a_missing_format_version_is_refused() -> None:
    reject(lambda plain: plain.pop("format"), "format", "expected a version number")


def drop(plain: Any, *path: Any) -> None:
    for part in path[:-1]:
        plain = plain[part]
    del plain[path[-1]]


def put(value: object, *path: Any) -> Callable[[Any], None]:
    def edit(plain: Any) -> None:
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
        (put("1", "exam", "proofs", 1, "error"), "exam.proofs[1].error", "expected number, got str"),
        (put(True, "exam", "proofs", 1, "error"), "exam.proofs[1].error", "expected number, got bool"),
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
        plain = json.loads(manifest_json.encode(with_file))
        edit(plain)
        with raises("manifest-invalid") as caught:
            manifest_json.decode(seal_plain(plain))
        assert str(caught.value).startswith(f"{path}: {expected}")
    else:
        reject(edit, path, expected)


def test_a_whole_number_is_a_number() -> None:
    found = decode_edited(put(0, "exam", "proofs", 0, "error")).exam.proofs[0].error
    assert type(found) is float and found == 0


# --- hostile numbers and depths ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400])
def test_a_number_that_no_float_holds_is_refused(number: str) -> None:
    """An infinite tolerance would let every exam pass."""
    plain = json.loads(manifest_json.encode(manifest()))
    plain["exam"]["proofs"][0]["tolerance"] = 0.123
    text = seal_plain(plain).decode().replace("0.123", number)
    text = text.replace(json.loads(seal_plain(plain))["sha256"], "0" * 64)
    with raises("manifest-invalid", match=r"exam\.proofs\[0\]\.tolerance|not JSON"):
        manifest_json.decode(seal_text(text))


@pytest.mark.parametrize("number", ["1e999", "NaN"])
def test_a_constant_that_no_float_holds_is_refused(number: str) -> None:
    plain = json.loads(manifest_json.encode(manifest()))
    plain["call"] = {"call": [["x", {"value": 0.123}]]}
    text = seal_plain(plain).decode().replace("0.123", number)
    text = text.replace(json.loads(seal_plain(plain))["sha256"], "0" * 64)
    with raises("manifest-invalid"):
        manifest_json.decode(seal_text(text))


def test_numbers_that_json_cannot_hold_are_refused_when_written() -> None:
    for number in (float("inf"), float("nan")):
        with raises("manifest-invalid", match="cannot hold the number"):
            manifest_json.encode(replace(manifest(), call={"value": number}))


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
    assert decode_edited(put([size, 3], "inputs", 0, "shape")).inputs[0].shape[1] == 3
