"""`cgcompile sign` and `verify --key`, and what inspect and diff show of a signature."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shlex import quote

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption
from typer.testing import CliRunner, Result

from cgbundle.format import file_names
from cgbundle.self_test import fresh
from cgcompile.bundle import manifest_text
from cgcompile.bundle.sign import sign
from cgcompile_cli import main
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.signing import Pair, flip
from tests.helpers.raising import raises


def call(*arguments: object) -> Result:
    """Runs a command as the shell would."""
    return CliRunner().invoke(main.app, [str(argument) for argument in arguments], prog_name="cgcompile", env={"COLUMNS": "200"})


# --- sign ---------------------------------------------------------------------------------------------------------


def test_sign_says_what_it_did(unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    ours, theirs = pairs
    result = call("sign", unsigned, "--key", ours.private)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"signed  {unsigned}: 5 files" in result.stdout and "in the place of" not in result.stdout
    assert f"cgcompile verify {quote(str(unsigned))} --key {ours.digits}" in result.stdout
    assert f"cgbundle.load({str(unsigned)!r}, key={ours.digits!r})" in result.stdout
    assert sorted(path.name for path in unsigned.iterdir() if "sig" in path.name) == [file_names.SIGNATURE]
    assert "in the place of an earlier signature" in call("sign", unsigned, "--key", theirs.private).stdout
    assert json.loads(call("sign", unsigned, "--key", ours.private, "--json").stdout) == {
        "path": str(unsigned), "key": ours.digits, "replaced": True,
    }  # fmt: skip
    assert call("verify", unsigned, "--key", ours.public).exit_code == 0


def test_signing_twice_gives_the_same_bytes(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    before = (signed / file_names.SIGNATURE).read_bytes()
    assert sign(signed, pairs[0].private).replaced
    assert (signed / file_names.SIGNATURE).read_bytes() == before
    assert before[:32].hex() == pairs[0].digits and len(before) == 96


def test_a_damaged_signature_is_replaced(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    (signed / file_names.SIGNATURE).write_bytes(b"")
    assert sign(signed, pairs[0].private).replaced
    assert call("verify", signed, "--key", pairs[0].public).exit_code == 0


@pytest.mark.parametrize("name", [file_names.WEIGHTS, file_names.SELF_TEST, tiny_bundle.HOST_FILE, file_names.MANIFEST])
def test_a_damaged_bundle_is_not_signed(unsigned: Path, pairs: tuple[Pair, Pair], name: str) -> None:
    flip(unsigned / name)
    assert call("sign", unsigned, "--key", pairs[0].private).exit_code == 1
    assert not (unsigned / file_names.SIGNATURE).exists()


def test_keys_that_do_not_sign(unsigned: Path, tmp_path: Path, pairs: tuple[Pair, Pair]) -> None:
    locked = Pair.make(tmp_path, "locked", encryption=BestAvailableEncryption(b"secret"))
    other = Pair.make(tmp_path, "rsa", rsa.generate_private_key(public_exponent=65537, key_size=1024))
    (tmp_path / "text").write_text("no key")
    for key, message in (
        (pairs[0].public, "a public key, expected the private key"),
        (locked.private, "the key is encrypted"),
        (other.private, "a private key, but not an ed25519 key"),
        (tmp_path / "text", "not a PEM file with a private key"),
    ):
        with raises("key-invalid", match=message):
            sign(unsigned, key)
    assert call("sign", unsigned, "--key", tmp_path / "none").stderr == f"error: {tmp_path / 'none'}: No such file or directory\n"
    assert not (unsigned / file_names.SIGNATURE).exists()


def test_a_failed_write_leaves_the_earlier_signature(
    signed: Path, pairs: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (signed / file_names.SIGNATURE).read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        sign(signed, pairs[1].private)
    assert (signed / file_names.SIGNATURE).read_bytes() == before
    assert [path.name for path in signed.iterdir() if path.name.startswith(file_names.SIGNATURE)] == [file_names.SIGNATURE]


def test_the_missing_extra_is_named(unsigned: Path, pairs: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with raises("library-missing", match="the package cryptography"):
        sign(unsigned, pairs[0].private)
    for command in (("sign", unsigned, "--key", pairs[0].private), ("verify", unsigned, "--key", pairs[0].public, "--run")):
        result = call(*command)
        assert (result.exit_code, result.stdout) == (2, "") and result.stderr.endswith("hint: pip install 'cryptography>=43'\n")
    assert call("verify", unsigned).exit_code == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_makes_keys_and_checks_signatures(unsigned: Path, tmp_path: Path) -> None:
    """These are the commands of bundles/TRUST.md."""
    script = """
    openssl genpkey -algorithm ed25519 -out private.pem
    openssl pkey -in private.pem -pubout -out public.pem
    """
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True)
    sign(unsigned, tmp_path / "private.pem")
    assert call("verify", unsigned, "--key", tmp_path / "public.pem").exit_code == 0
    quoted = quote(str(unsigned))
    script = f"""
    tail -c 64 {quoted}/manifest.json.sig > signature
    openssl pkeyutl -verify -pubin -inkey public.pem -rawin -in {quoted}/manifest.json -sigfile signature
    openssl pkey -pubin -in public.pem -outform DER | tail -c 32 | cmp - <(head -c 32 {quoted}/manifest.json.sig)
    """
    assert "Verified Successfully" in subprocess.check_output(["bash", "-ec", script], cwd=tmp_path, text=True)


# --- verify, inspect, diff ----------------------------------------------------------------------------------------


def test_verify_says_who_signed(signed: Path, unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    ours, theirs = pairs
    result = call("verify", signed, "--key", theirs.digits, "--key", ours.public)
    assert (result.exit_code, result.stderr) == (0, "") and result.stdout.endswith(f"\nsigned by key {ours.digits}\n")
    result = call("verify", signed)
    assert result.exit_code == 0 and result.stdout.endswith(f"{ours.digits}, which was not checked: give --key\n")
    assert "signed by" not in call("verify", unsigned).stdout
    assert json.loads(call("verify", signed, "--key", ours.public, "--json").stdout)["signature"] == {
        "key": ours.digits, "trusted": True,
    }  # fmt: skip
    assert json.loads(call("verify", signed, "--json").stdout)["signature"] == {"key": ours.digits, "trusted": False}


def test_verify_refuses(signed: Path, unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    ours, theirs = pairs
    for path, key, output in (
        (signed, theirs.public, "manifest.json.sig: signed with key"),
        (unsigned, ours.public, "the bundle is not signed"),
    ):
        result = call("verify", path, "--key", key, "--run")
        assert result.exit_code == 1 and "1 defect" in result.stderr and output in result.stdout
    result = call("verify", signed, "--key", ours.private)
    assert result.exit_code == 2 and "a private key" in result.stderr and result.stdout == ""
    flip(signed / file_names.WEIGHTS)
    flip(signed / file_names.SIGNATURE)
    output = json.loads(call("verify", signed, "--key", ours.public, "--json").stdout)
    assert [defect["code"] for defect in output["damage"]] == ["signature-wrong", "file-damaged"] and output["signature"] is None
    (signed / file_names.SIGNATURE).write_bytes(b"")
    output = json.loads(call("verify", signed, "--json").stdout)
    assert [defect["code"] for defect in output["damage"]] == ["signature-wrong", "file-damaged"] and output["signature"] is None


def test_the_process_that_replays_the_self_test_checks_the_signature_again(signed: Path, pairs: tuple[Pair, Pair]) -> None:
    assert "signed with key" in fresh(str(signed), [pairs[1].digits])["error"]


def test_inspect_says_who_signed(signed: Path, unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    assert f"signed     by key {pairs[0].digits} (not checked)\n" in call("inspect", signed).stdout
    assert "signed     no\n" in call("inspect", unsigned).stdout
    assert f"by key {pairs[0].digits} (not checked)<" in call("inspect", "--html", "-", signed).stdout
    assert json.loads(call("inspect", signed, "--json").stdout)["signature"] == {"key": pairs[0].digits}
    assert json.loads(call("inspect", unsigned, "--json").stdout)["signature"] is None
    (signed / file_names.SIGNATURE).write_bytes(b"")
    assert "signed     wrongly: manifest.json.sig: expected" in call("inspect", signed).stdout
    assert "expected 96 bytes" in json.loads(call("inspect", signed, "--json").stdout)["signature"]["error"]


def test_who_signed_is_no_difference_but_is_told(signed: Path, unsigned: Path, pairs: tuple[Pair, Pair]) -> None:
    result = call("diff", signed, unsigned)
    assert (result.exit_code, result.stdout) == (0, f"no difference\nsigned  A by key {pairs[0].digits} (not checked); B no\n")
    report = json.loads(call("diff", signed, unsigned, "--json").stdout)
    assert (report["a"]["signature"], report["b"]["signature"]) == ({"key": pairs[0].digits}, None)
    tiny_bundle.seal(unsigned, replace(tiny_bundle.manifest(), name="other", files=manifest_text.describe_files(str(unsigned))))
    assert f", signed by key {pairs[0].digits} (not checked)\n" in call("diff", signed, unsigned).stdout
