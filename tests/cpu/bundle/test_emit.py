"""A build ends with an error if the runtime could not read the bundle that it wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cgbundle.format import archive, limits
from cgbundle.format.schema import Manifest
from cgcompile.bundle.emit import seal
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.tiny_bundle import write_bundle
from tests.helpers.raising import raises


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda base: replace(base, name="x" * (limits.NAME + 1)), "name: 1025 characters, more than the limit"),
        (lambda base: replace(base, name="a\x1b[2J"), "name: .* is not printable"),
        (lambda base: edited(base, allowed=("\udc80",)), r"allowed\[0\]: .* is not printable"),
        (
            lambda base: edited(base, self_test=replace(base.entries[0].self_test, calls=10**400)),
            "self_test.calls: expected an integer of 64 bits",
        ),
        (lambda base: edited(base, result={"value": 10**400}), "result: .* 64 bits"),
        (lambda base: replace(base, provenance=replace(base.provenance, options=(("a" * 70_000, "b"),))), "70000 characters"),
    ],
)
def test_what_is_beyond_a_limit_is_an_error_of_the_build(tmp_path: Path, change: object, message: str) -> None:
    manifest = archive.read_manifest(str(write_bundle(tmp_path / "tiny.cgb")))
    assert callable(change)
    changed: Manifest = change(manifest)
    with raises("bundle-refused", match=f"^the bundle that was built: .*{message}"):
        seal(tmp_path / "tiny.cgb", changed)
