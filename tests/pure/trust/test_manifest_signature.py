"""Signed bundles: what `load(key=)` accepts and refuses, and what a signature means for the format."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cgbundle
from cgbundle import signatures
from cgbundle.errors import CgbundleError
from cgbundle.format import archive, file_names
from cgcompile.bundle import manifest_text
from cgcompile.bundle.sign import sign
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.signing import Pair, flip
from tests.helpers.places import ROOT
from tests.helpers.raising import raises


@contextmanager
def passes() -> Iterator[None]:
    """Expects a load that fails only when the shared object is opened or libtorch is searched for."""
    with pytest.raises(CgbundleError) as caught:
        yield
    assert caught.value.code in ("image-invalid", "library-missing"), caught.value


# --- load ---------------------------------------------------------------------------------------------------------


def test_a_signed_bundle_is_loaded_with_any_of_the_keys(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    ours, theirs = pairs
    for key in (ours.public, ours.digits, bytes.fromhex(ours.digits), [theirs.public, ours.public], [ours.digits, theirs.digits]):
        with passes():
            cgbundle.load(signed, key=key)
    with passes():
        cgbundle.load(signed)  # without a key the behaviour is as before


def test_another_key(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    ours, theirs = [f"{pair.digits[:16]}..." for pair in pairs]
    with raises("signature-wrong", match=f"manifest.json.sig: signed with key {ours}, expected {theirs}$"):
        cgbundle.load(signed, key=pairs[1].public)


def test_no_signature(unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    with raises("signature-missing", match="manifest.json.sig: missing: the bundle is not signed"):
        cgbundle.load(unsigned, key=pairs[0].public)


@pytest.mark.parametrize("keys", [[], (), b"", "", "no-such-file.pem"])
def test_a_key_that_is_none_is_never_taken_for_no_key(signed: Path, keys: object) -> None:
    with raises("key-invalid"):
        cgbundle.load(signed, key=keys)  # type: ignore[arg-type]


def test_the_private_key_is_refused(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    with raises("key-invalid", match="a private key, expected the public key"):
        cgbundle.load(signed, key=pairs[0].private)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def shrink(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [grow, shrink, empty, replace_by_pipe, replace_by_folder])
def test_a_file_that_is_no_signature(signed: Path, pairs: tuple[Pair, Pair], damage: Callable[[Path], None]) -> None:
    damage(signed / file_names.SIGNATURE)
    message = "manifest.json.sig: " + ("not a file" if "replace" in damage.__name__ else "expected 96 bytes")
    with raises("signature-wrong", match=message):
        cgbundle.load(signed, key=pairs[0].public)
    with raises("signature-wrong", match=message):  # even without a key
        signatures.read(archive.Archive(str(signed)))


def test_a_signature_that_is_a_link_to_itself(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    (signed / file_names.SIGNATURE).unlink()
    (signed / file_names.SIGNATURE).symlink_to(file_names.SIGNATURE)
    with raises("signature-wrong", match="manifest.json.sig: a symbolic link, which a bundle must not hold"):
        cgbundle.load(signed, key=pairs[0].public)


@pytest.mark.parametrize("at", [0, 31, 32, 63, 64, 95])
def test_every_part_of_a_signature_counts(signed: Path, pairs: tuple[Pair, Pair], at: int) -> None:
    flip(signed / file_names.SIGNATURE, at)
    with raises("signature-wrong"):
        cgbundle.load(signed, key=pairs[0].public)


def test_a_manifest_changed_after_the_signature(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    """The changed manifest has right hashes again, as an attacker would write it."""
    flip(signed / file_names.PROGRAM)
    tiny_bundle.seal(signed, replace(tiny_bundle.manifest(), files=manifest_text.describe_files(str(signed))))
    with passes():
        cgbundle.load(signed)
    with raises("signature-wrong", match=f"key {pairs[0].digits[:16]}... did not sign this manifest"):
        cgbundle.load(signed, key=pairs[0].public)


def test_a_signature_comes_before_anything_that_the_manifest_says(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    (signed / file_names.MANIFEST).write_bytes(b"[" * 100_000)
    with raises("signature-wrong", match="did not sign"):
        cgbundle.load(signed, key=pairs[0].public)


@pytest.mark.parametrize("name", [file_names.WEIGHTS, file_names.SELF_TEST, file_names.PROGRAM, tiny_bundle.HOST_FILE])
def test_a_key_means_that_every_file_is_checked(signed: Path, pairs: tuple[Pair, Pair], name: str) -> None:
    flip(signed / name)
    with raises("file-damaged", match=f"{name}: SHA-256"):
        cgbundle.load(signed, key=pairs[0].public)
    with raises("file-damaged", match=f"{name}: SHA-256"):
        cgbundle.load(signed, key=pairs[0].public, check="load")


def test_a_file_that_nobody_signed(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    (signed / "stranger").write_text("")
    with raises("file-damaged", match="stranger: not named in the manifest"):
        cgbundle.load(signed, key=pairs[0].public)


def test_the_bytes_that_were_checked_are_those_that_are_used(
    signed: Path, pairs: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that replaces the checked one after the check of the signature is not read."""
    check = signatures.check

    def checked(*arguments: Any) -> object:
        signature = check(*arguments)
        (signed / file_names.MANIFEST).write_bytes(b"another")
        return signature

    monkeypatch.setattr(signatures, "check", checked)
    with passes():
        cgbundle.load(signed, key=pairs[0].public)
    assert (signed / file_names.MANIFEST).read_bytes() == b"another"


def test_only_a_key_brings_the_code_that_checks_it(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    code = (
        "import sys, cgbundle\n"
        "for key in ({}, {'key': sys.argv[2]}):\n"
        "    try: cgbundle.load(sys.argv[1], **key)\n"
        "    except cgbundle.CgbundleError: pass\n"
        "    print('cgbundle.signatures' in sys.modules, 'cryptography' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "bundles")}
    command = [sys.executable, "-c", code, str(signed), pairs[0].digits]
    assert subprocess.check_output(command, env=environment, text=True).splitlines() == ["False False", "True True"]


@pytest.mark.parametrize("missing", ["cryptography", "cryptography.hazmat.primitives.asymmetric"])
@pytest.mark.parametrize("key", ["ours", "theirs", "none", "empty"])
def test_a_key_without_the_package_is_never_a_load_without_the_check(
    signed: Path, pairs: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch, missing: str, key: str
) -> None:
    """This holds for the right key, a wrong one and an invalid one, with the package absent or broken."""
    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, missing, None)
    keys: dict[str, Any] = {"ours": pairs[0].public, "theirs": pairs[1].digits, "none": "no-such-file.pem", "empty": []}
    with raises("library-missing", match=r"the package cryptography \(extra `sign`\), which is not installed$") as caught:
        cgbundle.load(signed, key=keys[key])
    assert caught.value.hint == "pip install 'cryptography>=43'"  # type: ignore[attr-defined]
    with passes():
        cgbundle.load(signed)


# --- the format ---------------------------------------------------------------------------------------------------


def test_a_signature_is_no_file_of_the_manifest(signed: Path) -> None:
    assert file_names.SIGNATURE not in [file.path for file in manifest_text.describe_files(str(signed))]
    rows = [*archive.read_manifest(str(signed)).files]
    rows[0] = replace(rows[0], path=file_names.SIGNATURE)
    tiny_bundle.seal(signed, replace(tiny_bundle.manifest(), files=tuple(rows)))
    with raises("manifest-invalid", match="'manifest.json.sig' is no path inside the bundle"):
        cgbundle.load(signed)


def test_a_rebuild_drops_the_signature(signed: Path) -> None:
    """Publishing replaces the whole directory."""
    from cgcompile.bundle.publish import staged

    with staged(signed, replace=True) as stage:
        tiny_bundle.write_bundle(stage / "made")
        for path in (stage / "made").iterdir():
            path.rename(stage / path.name)
        (stage / "made").rmdir()
    assert not (signed / file_names.SIGNATURE).exists()


def test_loading_while_a_bundle_is_signed_again(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    """A reader finds one of the two signatures, complete."""
    stop = threading.Event()

    def signs() -> None:
        while not stop.is_set():
            assert all([sign(signed, pair.private).replaced for pair in pairs])

    thread = threading.Thread(target=signs)
    thread.start()
    try:
        bundle = archive.Archive(str(signed))
        for _ in range(60):
            signatures.check(bundle, [pair.digits for pair in pairs])
    finally:
        stop.set()
        thread.join()
