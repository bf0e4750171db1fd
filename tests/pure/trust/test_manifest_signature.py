"""Signed bundles: `load(key=)`, `cgcompile sign`, `verify --key`, and what inspect and diff say.

The tiny bundle's shared object is a dummy, so that a load which nothing refuses earlier ends there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption
from typer.testing import CliRunner, Result

import cgbundle
from cgbundle.errors import CgbundleError
from cgbundle.format import archive
from cgbundle.trust import manifest_signature
from cgcompile.bundle.sign import sign
from cgcompile_cli import main
from tests.helpers import support
from tests.helpers.places import ROOT
from tests.helpers.raising import raises
from tests.helpers.signing import Pair


def call(*arguments: object) -> Result:
    """A command as the shell would run it."""
    return CliRunner().invoke(main.app, [str(each) for each in arguments], prog_name="cgcompile", env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Pair]:
    """Ours, and another's."""
    folder = tmp_path_factory.mktemp("keys")
    return Pair.make(folder, "ours"), Pair.make(folder, "theirs")


@pytest.fixture(scope="module")
def signed_once(tmp_path_factory: pytest.TempPathFactory, pairs: tuple[Pair, Pair]) -> Path:
    path = support.write_bundle(tmp_path_factory.mktemp("signed") / "tiny.cgb")
    sign(path, pairs[0].private)
    return path


@pytest.fixture
def signed(signed_once: Path, tmp_path: Path) -> Path:
    """A signed bundle of the test's own: copying one keeps the signature."""
    return Path(shutil.copytree(signed_once, tmp_path / "tiny.cgb"))


@pytest.fixture
def unsigned(tmp_path: Path) -> Path:
    return support.write_bundle(tmp_path / "unsigned.cgb")


def flip(path: Path, at: int = -2) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@contextmanager
def passes() -> Iterator[None]:
    """A load that nothing refuses before the shared object is to be opened, or libtorch to be found."""
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
        cgbundle.load(signed)  # who asks for no key gets what he got before


def test_another_key(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    ours, theirs = [f"{pair.digits[:16]}..." for pair in pairs]
    with raises("signature-wrong", match=f"manifest.json.sig: by key {ours}, expected {theirs}$"):
        cgbundle.load(signed, key=pairs[1].public)


def test_no_signature(unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    with raises("signature-missing", match="manifest.json.sig: missing: the bundle is not signed"):
        cgbundle.load(unsigned, key=pairs[0].public)


@pytest.mark.parametrize("keys", [[], (), b"", "", "no-such-file.pem"])
def test_a_key_that_is_none_is_never_taken_for_no_key(signed: Path, keys: object) -> None:
    with raises("key-invalid"):
        cgbundle.load(signed, key=keys)  # type: ignore[arg-type]


def test_the_private_key_is_refused(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    with raises("key-invalid", match="a private key, where the public one is enough"):
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
    damage(signed / archive.SIGNATURE)
    told = "manifest.json.sig: " + ("not a file" if "replace" in damage.__name__ else "longer or shorter than 96 bytes")
    with raises("signature-wrong", match=told):
        cgbundle.load(signed, key=pairs[0].public)
    assert told in call("verify", signed, "--key", pairs[0].public).stdout
    assert told in call("verify", signed).stdout, "also where nobody asks for a key"


def test_a_signature_that_is_a_link_to_itself(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    (signed / archive.SIGNATURE).unlink()
    (signed / archive.SIGNATURE).symlink_to(archive.SIGNATURE)
    with raises("signature-wrong", match="manifest.json.sig: a symbolic link, which a bundle must not hold"):
        cgbundle.load(signed, key=pairs[0].public)


@pytest.mark.parametrize("at", [0, 31, 32, 63, 64, 95])
def test_every_part_of_a_signature_counts(signed: Path, pairs: tuple[Pair, Pair], at: int) -> None:
    flip(signed / archive.SIGNATURE, at)
    with raises("signature-wrong"):
        cgbundle.load(signed, key=pairs[0].public)


def test_a_manifest_that_was_changed_after(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    """Sealed again, as somebody would who changes a file of the bundle: its hashes are right."""
    flip(signed / archive.PROGRAM)
    support.seal(signed, replace(support.manifest(), files=archive.describe_files(str(signed))))
    with passes():
        cgbundle.load(signed)
    with raises("signature-wrong", match=f"key {pairs[0].digits[:16]}... did not sign this manifest"):
        cgbundle.load(signed, key=pairs[0].public)


def test_a_signature_comes_before_anything_that_the_manifest_says(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    (signed / archive.MANIFEST).write_bytes(b"[" * 100_000)
    with raises("signature-wrong", match="did not sign"):
        cgbundle.load(signed, key=pairs[0].public)


@pytest.mark.parametrize("name", [archive.WEIGHTS, archive.EXAM, archive.PROGRAM, support.HOST_FILE])
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
    """A manifest that is exchanged after the signature was checked is not looked at."""
    check = manifest_signature.check

    def checked(*arguments: Any) -> object:
        found = check(*arguments)
        (signed / archive.MANIFEST).write_bytes(b"another")
        return found

    monkeypatch.setattr(manifest_signature, "check", checked)
    with passes():
        cgbundle.load(signed, key=pairs[0].public)
    assert (signed / archive.MANIFEST).read_bytes() == b"another"


def test_only_a_key_brings_the_code_that_checks_it(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    code = (
        "import sys, cgbundle\n"
        "for key in ({}, {'key': sys.argv[2]}):\n"
        "    try: cgbundle.load(sys.argv[1], **key)\n"
        "    except cgbundle.CgbundleError: pass\n"
        "    print(any(name.startswith('cgbundle.trust') for name in sys.modules), 'cryptography' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "bundles")}
    command = [sys.executable, "-c", code, str(signed), pairs[0].digits]
    assert subprocess.check_output(command, env=environment, text=True).splitlines() == ["False False", "True False"]


# --- sign ---------------------------------------------------------------------------------------------------------


def test_sign_says_what_it_did(unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    ours, theirs = pairs
    result = call("sign", unsigned, "--key", ours.private)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"signed  {unsigned}: 5 files" in result.stdout and "in the place of" not in result.stdout
    assert f"cgcompile verify {unsigned} --key {ours.digits}" in result.stdout
    assert f"cgbundle.load({str(unsigned)!r}, key={ours.digits!r})" in result.stdout
    assert sorted(each.name for each in unsigned.iterdir() if "sig" in each.name) == [archive.SIGNATURE]
    assert "in the place of an earlier signature" in call("sign", unsigned, "--key", theirs.private).stdout
    assert json.loads(call("sign", unsigned, "--key", ours.private, "--json").stdout) == {
        "path": str(unsigned), "key": ours.digits, "replaced": True,
    }  # fmt: skip
    assert call("verify", unsigned, "--key", ours.public).exit_code == 0


def test_signing_twice_gives_the_same_bytes(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    before = (signed / archive.SIGNATURE).read_bytes()
    assert sign(signed, pairs[0].private).replaced
    assert (signed / archive.SIGNATURE).read_bytes() == before
    assert before[:32].hex() == pairs[0].digits and len(before) == 96


def test_a_damaged_signature_is_replaced(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    empty(signed / archive.SIGNATURE)
    assert sign(signed, pairs[0].private).replaced
    assert call("verify", signed, "--key", pairs[0].public).exit_code == 0


@pytest.mark.parametrize("name", [archive.WEIGHTS, archive.EXAM, support.HOST_FILE, archive.MANIFEST])
def test_a_damaged_bundle_is_not_signed(unsigned: Path, pairs: tuple[Pair, Pair], name: str) -> None:
    flip(unsigned / name)
    assert call("sign", unsigned, "--key", pairs[0].private).exit_code == 1
    assert not (unsigned / archive.SIGNATURE).exists()


def test_keys_that_do_not_sign(unsigned: Path, tmp_path: Path, pairs: tuple[Pair, Pair]) -> None:
    locked = Pair.make(tmp_path, "locked", encryption=BestAvailableEncryption(b"secret"))
    other = Pair.make(tmp_path, "rsa", rsa.generate_private_key(public_exponent=65537, key_size=1024))
    (tmp_path / "text").write_text("no key")
    for key, told in (
        (pairs[0].public, "a public key: only the private one signs"),
        (locked.private, "the key is encrypted"),
        (other.private, "a private key, but none of ed25519"),
        (tmp_path / "text", "no PEM file with a private key"),
    ):
        with raises("key-invalid", match=told):
            sign(unsigned, key)
    assert call("sign", unsigned, "--key", tmp_path / "none").stderr == f"error: {tmp_path / 'none'}: No such file or directory\n"
    assert not (unsigned / archive.SIGNATURE).exists()


def test_a_failed_write_leaves_the_earlier_signature(
    signed: Path, pairs: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (signed / archive.SIGNATURE).read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        sign(signed, pairs[1].private)
    assert (signed / archive.SIGNATURE).read_bytes() == before
    assert [each.name for each in signed.iterdir() if each.name.startswith(archive.SIGNATURE)] == [archive.SIGNATURE]


def test_the_missing_extra_is_named(unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    code = "import sys; sys.modules['cryptography'] = None\nfrom cgcompile_cli.main import main; main()"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles")])
    command = [sys.executable, "-c", code, "sign", str(unsigned), "--key", str(pairs[0].private)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: signing needs cryptography, which is not installed\nhint: pip install 'cgcompile[sign]'\n"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_makes_keys_and_checks_signatures(unsigned: Path, tmp_path: Path) -> None:
    """What bundles/TRUST.md says to type."""
    script = """
    openssl genpkey -algorithm ed25519 -out private.pem
    openssl pkey -in private.pem -pubout -out public.pem
    """
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True)
    sign(unsigned, tmp_path / "private.pem")
    assert call("verify", unsigned, "--key", tmp_path / "public.pem").exit_code == 0
    script = f"""
    tail -c 64 {unsigned}/manifest.json.sig > signature
    openssl pkeyutl -verify -pubin -inkey public.pem -rawin -in {unsigned}/manifest.json -sigfile signature
    openssl pkey -pubin -in public.pem -outform DER | tail -c 32 | cmp - <(head -c 32 {unsigned}/manifest.json.sig)
    """
    assert "Verified Successfully" in subprocess.check_output(["bash", "-ec", script], cwd=tmp_path, text=True)


# --- verify, inspect, diff ----------------------------------------------------------------------------------------


def test_verify_says_who_signed(signed: Path, unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    ours, theirs = pairs
    result = call("verify", signed, "--key", theirs.digits, "--key", ours.public)
    assert (result.exit_code, result.stderr) == (0, "") and result.stdout.endswith(f"\nsigned by key {ours.digits}\n")
    result = call("verify", signed)
    assert result.exit_code == 0 and result.stdout.endswith(f"{ours.digits}, which was not compared with a --key\n")
    assert "signed by" not in call("verify", unsigned).stdout
    assert json.loads(call("verify", signed, "--key", ours.public, "--json").stdout)["signature"] == {
        "key": ours.digits, "trusted": True,
    }  # fmt: skip
    assert json.loads(call("verify", signed, "--json").stdout)["signature"] == {"key": ours.digits, "trusted": False}


def test_verify_refuses(signed: Path, unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    ours, theirs = pairs
    for path, key, told in (
        (signed, theirs.public, "manifest.json.sig: by key"),
        (unsigned, ours.public, "the bundle is not signed"),
    ):
        result = call("verify", path, "--key", key, "--run")
        assert result.exit_code == 1 and "1 defect" in result.stderr and told in result.stdout
    result = call("verify", signed, "--key", ours.private)
    assert result.exit_code == 2 and "a private key" in result.stderr and result.stdout == ""
    flip(signed / archive.WEIGHTS)
    flip(signed / archive.SIGNATURE)
    for options in ((), ("--key", ours.public)):
        told = json.loads(call("verify", signed, *options, "--json").stdout)
        assert [each["kind"] for each in told["damage"]] == ["SignatureWrong", "FileDamaged"] and told["signature"] is None


def test_the_process_that_replays_the_exam_checks_the_signature_again(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    from cgbundle.exam import fresh

    assert "by key" in fresh(str(signed), [pairs[1].digits])["error"]


def test_inspect_says_who_signed(signed: Path, unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    assert f"signed     by key {pairs[0].digits}\n" in call("inspect", signed).stdout
    assert "signed     no\n" in call("inspect", unsigned).stdout
    assert f"by key {pairs[0].digits}<" in call("inspect", "--html", "-", signed).stdout
    assert json.loads(call("inspect", signed, "--json").stdout)["signature"] == {"key": pairs[0].digits}
    assert json.loads(call("inspect", unsigned, "--json").stdout)["signature"] is None
    flip(signed / archive.SIGNATURE)
    assert "signed     wrongly: manifest.json.sig: key" in call("inspect", signed).stdout
    empty(signed / archive.SIGNATURE)
    assert "than 96 bytes" in json.loads(call("inspect", signed, "--json").stdout)["signature"]["error"]


def test_who_signed_is_no_difference_but_is_told(signed: Path, unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    result = call("diff", signed, unsigned)
    assert (result.exit_code, result.stdout) == (0, f"no difference\nsigned  A by key {pairs[0].digits}; B no\n")
    told = json.loads(call("diff", signed, unsigned, "--json").stdout)
    assert (told["a"]["signature"], told["b"]["signature"]) == ({"key": pairs[0].digits}, None)
    support.seal(unsigned, replace(support.manifest(), name="other", files=archive.describe_files(str(unsigned))))
    assert f", signed by key {pairs[0].digits}\n" in call("diff", signed, unsigned).stdout


# --- the format ---------------------------------------------------------------------------------------------------


def test_a_signature_is_no_file_of_the_manifest(signed: Path) -> None:
    assert archive.SIGNATURE not in [file.path for file in archive.describe_files(str(signed))]
    rows = [*archive.read_manifest(str(signed)).files]
    rows[0] = replace(rows[0], path=archive.SIGNATURE)
    support.seal(signed, replace(support.manifest(), files=tuple(rows)))
    with raises("manifest-invalid", match="'manifest.json.sig' is no path inside the bundle"):
        cgbundle.load(signed)


def test_a_rebuild_drops_the_signature(signed: Path) -> None:
    """Whatever is published takes the place of the whole directory."""
    from cgbundle.format.publish import staged

    with staged(signed, replace=True) as stage:
        support.write_bundle(stage / "made")
        for each in (stage / "made").iterdir():
            each.rename(stage / each.name)
        (stage / "made").rmdir()
    assert not (signed / archive.SIGNATURE).exists() and call("verify", signed).exit_code == 0


def test_loading_while_a_bundle_is_signed_again(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    """A reader finds one of the two signatures, whole."""
    stop = threading.Event()

    def signs() -> None:
        while not stop.is_set():
            assert all([sign(signed, pair.private).replaced for pair in pairs])

    thread = threading.Thread(target=signs)
    thread.start()
    try:
        bundle = archive.Archive(str(signed))
        for _ in range(60):
            manifest_signature.check(bundle, [pair.digits for pair in pairs])
    finally:
        stop.set()
        thread.join()
