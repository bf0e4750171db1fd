"""`cgcompile run` on golden CPU bundles, without torch: repeated replays, outputs on stdout, complex numbers."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cgbundle.errors import MachineError
from cgbundle.format.archive import read_manifest
from cgbundle.format.safetensors_files import Mapped
from cgbundle.loader import load
from cgbundle.tensors.tensor import from_bytes
from cgcompile_cli import main
from cgcompile_cli.commands import run
from tests.helpers.bundles.tiny_bundle import write_bundle
from tests.helpers.places import GOLDEN, ROOT

STATE = GOLDEN / "v1/cpu_state.cgb"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main.app, ["run", *map(str, arguments)], prog_name="cgcompile", env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def bundle() -> Path:
    """Returns a bundle whose calls change its state and an input. Skips the test if this machine cannot run the bundle."""
    try:
        load(STATE).close()
    except MachineError as error:
        pytest.skip(str(error))
    return STATE


def test_size_picks_among_the_stored_inputs() -> None:
    result = call(STATE, "--size", "9999")
    assert result.exit_code == 2 and "--size selects among the stored inputs: no int_key '9999': the bundle has " in result.stderr
    assert "hint: inputs of another size: --inputs FILE" in result.stderr and "more --sizes" not in result.stderr
    named = call(STATE, "--size", "batch=2,bath=1")
    assert "no dimension 'bath'" in named.stderr


def test_inputs_of_the_self_test_are_named_with_their_size(bundle: Path, tmp_path: Path) -> None:
    smallest = min(program.key for program in read_manifest(str(bundle)).entries[0].programs)
    shown = "x".join(map(str, smallest))
    line = f"inputs: those of the self-test at int_key {shown} (others: --size); for your own: --inputs FILE\n"
    assert line in call(bundle).stderr and line not in call(bundle, "--quiet").stderr
    stored = tmp_path / "inputs.safetensors"
    copied = subprocess.run(
        [sys.executable, "-c", COPY, bundle, stored], env=os.environ | {"PYTHONPATH": str(ROOT / "bundles")}, check=True
    )
    assert copied.returncode == 0 and "inputs: those" not in call(bundle, "--inputs", stored).stderr


COPY = """
import sys
from cgbundle import self_test
from cgbundle.format.archive import Archive
from cgbundle.format.safetensors_files import write
bundle = Archive(sys.argv[1])
entry = bundle.manifest.entries[0]
stored = bundle.mapped("exam.safetensors")
tensors = self_test.inputs_of(stored, entry, min(program.key for program in entry.programs))
with open(sys.argv[2], "wb") as file:
    write(file, {spec.name: (value.dtype, value.shape, value.tobytes) for spec, value in zip(entry.inputs, tensors)})
"""
"""Writes the inputs of the self-test to a file, under their names."""


def test_no_replays_are_no_repetition() -> None:
    assert call(STATE, "--repeat", 0).exit_code == 2


def test_threads_are_passed_on(bundle: Path) -> None:
    assert call(bundle, "--threads", 1).exit_code == 0
    assert call(bundle, "--threads", 0).exit_code == 2


def test_repeated_replays_are_all_of_the_same_inputs_and_state(bundle: Path, tmp_path: Path) -> None:
    once = json.loads(call(bundle, "--json").stdout)
    often = json.loads(call(bundle, "--json", "--repeat", 20).stdout)
    assert "repeated" not in once["seconds"]
    assert once["outputs"][2:] == often["outputs"][2:], "what no random numbers went into"
    row = often["seconds"]["repeated"]
    assert list(row) == ["replays", "min", "p50", "p90", "p99", "max", "mean"] and row["replays"] == 20
    assert 0 < row["min"] <= row["p50"] <= row["p90"] <= row["p99"] <= row["max"] and row["min"] <= row["mean"] <= row["max"]
    shown = call(bundle, "--repeat", 20).stdout.splitlines()
    assert shown[-2].split() == ["replays", "min", "p50", "p90", "p99", "max", "mean"] and shown[-1].split()[0] == "20"


def test_every_replay_is_given_what_the_first_was(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cgbundle.program import Program

    replays: list[Any] = []
    replay = Program.replay

    def seen(self: Program, tensors: Any) -> Any:
        before = [tensor.tobytes() for tensor in tensors]
        results = replay(self, tensors)
        replays.append((before, [tensor.tobytes() for tensor in results]))
        return results

    monkeypatch.setattr(Program, "replay", seen)
    assert call(bundle, "--repeat", 3).exit_code == 0
    inputs, outputs = zip(*replays, strict=True)
    assert len(replays) == 4 and inputs.count(inputs[0]) == 4
    deterministic = [values for values in zip(*outputs, strict=True) if len(set(values)) == 1]
    assert len(deterministic) >= 2, "state was brought back; what random numbers went into differs"


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, (1, 1, 1, 1, 1)),
        (2, (1, 1, 2, 2, 2)),
        (10, (1, 5, 9, 10, 10)),
        (100, (1, 50, 90, 99, 100)),
        (200, (1, 100, 180, 198, 200)),
    ],
)
def test_percentiles_are_values_that_were_measured(count: int, expected: tuple[int, ...]) -> None:
    row = run._statistics([float(value) for value in reversed(range(1, count + 1))])
    assert tuple(row[name] for name in ("min", "p50", "p90", "p99", "max")) == expected
    assert row["mean"] == pytest.approx((count + 1) / 2) and row["replays"] == count


# --- outputs on stdout --------------------------------------------------------------------------------------------


def test_outputs_go_to_stdout_as_safetensors(bundle: Path, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles")])
    done = subprocess.run(
        [sys.executable, "-m", "cgcompile_cli", "run", bundle, "--outputs", "-"],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, check=True,
    )  # fmt: skip
    (tmp_path / "out.safetensors").write_bytes(done.stdout)
    held = Mapped(str(tmp_path / "out.safetensors"), "out")
    assert set(held.entries) >= {"0", "1", "2", "3"}
    held.close()
    assert done.stderr.startswith(b"output  dtype") and b"loaded in" in done.stderr


def test_stdout_takes_one_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write_bundle(tmp_path / "tiny.cgb")
    result = call(bundle, "--outputs", "-", "--json")
    assert result.exit_code == 2 and "--outputs - and --json both write to stdout" in result.stderr

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    with pytest.raises(run.UsageError, match="stdout is a terminal"):
        run._check_outputs("-", as_json=False)


def test_a_file_that_cannot_be_written_is_told_before_the_bundle_is_loaded(tmp_path: Path) -> None:
    bundle = shutil.copytree(write_bundle(tmp_path / "tiny.cgb"), tmp_path / "copy.cgb")
    for path in (tmp_path, tmp_path / "missing/out.safetensors"):
        result = call(bundle, "--outputs", path)
        assert result.exit_code == 2 and f"{path}: cannot be written" in result.stderr


# --- values -------------------------------------------------------------------------------------------------------


def test_complex_numbers_are_shown_as_such() -> None:
    value = from_bytes(struct.pack("<6f", 1.5, -2, 0, 0.1, float("nan"), float("inf")), "complex64", (1, 3))
    values = run.preview(value)
    assert [run._spelled(value) for value in values] == ["1.5-2j", "0.1j", "nan+infj"]
    plain = run._plain({"name": "z", "values": values})
    assert plain["values"] == [[1.5, -2.0], [0.0, 0.1], ["nan", "inf"]] and json.dumps(plain, allow_nan=False)


def test_other_numbers_are_as_they_were() -> None:
    value = from_bytes(struct.pack("<2f", 1 / 3, float("-inf")), "float32", (2,))
    assert run._plain({"values": run.preview(value)})["values"] == [0.333333, "-inf"]
    assert run._plain({"values": run.preview(from_bytes(b"\x01\x00", "bool", (2,)))})["values"] == [True, False]
