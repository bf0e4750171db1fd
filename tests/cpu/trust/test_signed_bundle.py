"""A signed bundle that runs: loaded with a key, and its self-test replayed by a process that also has the key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from typer.testing import CliRunner

import cgbundle
from cgbundle.format import file_names
from cgcompile.bundle.sign import sign
from cgcompile_cli import main
from tests.helpers.bundles.signing import Pair
from tests.helpers.raising import raises


def test_what_was_signed_is_loaded_and_runs(bundle: Path, tmp_path: Path) -> None:
    copy, ours, theirs = shutil.copytree(bundle, tmp_path / "tiny.cgb"), Pair.make(tmp_path), Pair.make(tmp_path, "theirs")
    sign(copy, ours.private)
    x = torch.randn(4, 6)
    with cgbundle.load(bundle) as unsigned, cgbundle.load(copy, key=[theirs.digits, ours.public]) as signed:
        assert torch.equal(unsigned(x), signed(x))
    for key, code in ((ours, 0), (theirs, 1)):
        result = CliRunner().invoke(main.app, ["verify", str(copy), "--run", "--key", str(key.public), "--json"])
        info = json.loads(result.stdout)
        assert result.exit_code == code and bool(info["self_test"]) is (code == 0), "a self-test is replayed only of what is signed"
    with open(copy / file_names.WEIGHTS, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    cgbundle.load(copy).close()  # without a key the weights are not hashed
    with raises("file-damaged", match="weights.safetensors: SHA-256"):
        cgbundle.load(copy, key=ours.public)
