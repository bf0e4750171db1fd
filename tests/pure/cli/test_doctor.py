"""`doctor`, `targets` and `cache` show what is installed, what can be built and run, and what is cached. Needs no torch."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cgbundle.errors import MachineError
from cgcompile.targets.architectures import ARCHES
from cgcompile.targets.instruction_sets import LEVELS
from cgcompile.targets.requirements import check_packages
from cgcompile.tools import environment as tools
from cgcompile.tools.environment import Gpu, environment
from cgcompile.util.content_cache import digest, kept, remember
from cgcompile_cli import main
from tests.helpers.raising import raises

H200 = Gpu(name="NVIDIA H200", arch="sm_90", memory=141 << 30)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main.app, [str(argument) for argument in arguments], prog_name="cgcompile", env={"COLUMNS": "80"})


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that simulates a machine with these GPUs and packages. It returns the targets."""

    def make(gpus: tuple[Gpu, ...] = (), lacking: tuple[str, ...] = (), cuda: str = " (CUDA 13.0)") -> dict[str, tools.TargetHere]:
        missing = "" if gpus else "no CUDA driver (libcuda.so.1)"
        monkeypatch.setattr(tools, "_gpus", lambda: (gpus, "13.0" if gpus else "", missing))
        monkeypatch.setattr(tools, "_cuda_of_torch", lambda: cuda)
        present = lambda name: None if name in lacking else object()  # noqa: E731
        monkeypatch.setattr("importlib.util.find_spec", present)
        monkeypatch.setattr(tools, "find_spec", present)
        monkeypatch.setattr("cgcompile.targets.requirements.compiler", lambda: "c++" if "c++" in lacking else "sh")
        monkeypatch.setattr(tools.libtorch, "find", lambda needed: ("", ""))
        return {target.name: target for target in environment().targets}

    return make


def test_every_target_has_a_row(here: Any) -> None:
    assert list(here()) == ["cpu", *[row.name for row in LEVELS], "cuda", *[row.name for row in ARCHES]]


def test_a_machine_without_a_gpu_builds_for_those_that_are_not_here(here: Any) -> None:
    targets = here()
    assert (targets["cpu"].recorder, targets["cpu"].not_run) == ("host", "")
    assert (targets["cuda"].recorder, targets["cuda"].not_built) == ("", "no CUDA driver (libcuda.so.1)")
    assert (targets["sm_90"].recorder, targets["sm_90"].not_run) == ("cross-compile", "no CUDA driver (libcuda.so.1)")


def test_a_gpu_that_is_here_is_captured_and_runs(here: Any) -> None:
    targets = here((H200,))
    assert [targets[name].recorder for name in ("cuda", "sm_90", "sm_80")] == ["capture", "capture", "cross-compile"]
    assert (targets["cuda"].not_run, targets["sm_90"].not_run, targets["sm_80"].not_run) == ("", "", "the GPU here is sm_90")


def test_a_gpu_beside_a_torch_without_cuda_is_built_for_as_if_it_were_elsewhere(here: Any) -> None:
    targets = here((H200,), cuda=" (without CUDA)")
    assert (targets["cuda"].not_built, targets["sm_90"].recorder) == ("torch is installed without CUDA", "cross-compile")


def test_without_torchs_libraries_standalone_bundles_run_where_the_processor_does(
    here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here()

    def missing(needed: str) -> None:
        raise MachineError("library-missing", "libtorch_cpu.so not found")

    monkeypatch.setattr(tools.libtorch, "find", missing)
    by_name = {target.name: target for target in environment().targets}
    assert (by_name["cpu"].standalone, by_name["cpu"].not_run) == (True, "libtorch_cpu.so not found")
    foreign = by_name["x86-64-v3" if os.uname().machine == "aarch64" else "armv8-a"]
    assert not foreign.standalone and "the code is for" in foreign.not_run and "proved" not in foreign.not_run
    assert foreign.not_built.startswith(f"target {foreign.name}: {foreign.not_run}; ")  # run and build have the same reason
    shown = " ".join(call("targets").output.split())
    assert "cpu processors like this one yes what needs no torch" in shown


def test_an_architecture_that_nobody_described_can_be_captured_alone(here: Any) -> None:
    other = Gpu(name="Tesla T4", arch="sm_75", memory=16 << 30)
    assert (here((other,))["sm_75"].recorder, here((other,), cuda=" (without CUDA)")["sm_75"].recorder) == ("capture", "")


@pytest.mark.parametrize(
    ("lacking", "target", "said", "fix"),
    [
        ("torch", "cpu", "building needs torch, which is not installed", "'triton>=3.6,<3.8'"),
        ("triton", "sm_90", "building needs triton, which is not installed", "'triton>=3.6,<3.8'"),
        ("c++", "x86-64-v2", "no C++ compiler: 'c++' is not on the PATH", "install g++"),
    ],
)
def test_what_is_missing_is_named_with_its_cure(here: Any, lacking: str, target: str, said: str, fix: str) -> None:
    if lacking == "c++":
        here = _without_compiler(here)
    row = here(lacking=(lacking,))[target]
    assert row.not_built == said and fix in row.fix and not row.recorder


@pytest.mark.parametrize(
    ("version", "known"), [("3.5.1", False), ("3.6.0", True), ("3.7.9+git1", True), ("3.8.0", False), ("4.0", False)]
)
def test_a_triton_that_kernels_cannot_be_interpreted_with_is_named(
    here: Any, monkeypatch: pytest.MonkeyPatch, version: str, known: bool
) -> None:
    monkeypatch.setattr("cgcompile.targets.requirements.installed", lambda name: version)
    target = here()["sm_90"]
    assert target.recorder == ("cross-compile" if known else "")
    if not known:
        assert target.not_built == f"Triton {version} is installed, and this needs one of 3.6 to 3.7"
        assert target.fix == "pip install 'triton>=3.6,<3.8'"
        with raises("triton-unsupported"):
            check_packages("cross-compile")


def _without_compiler(here: Any) -> Any:
    def make(lacking: tuple[str, ...]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shutil.which", lambda name: None)
            return here(lacking=lacking)

    return make


def test_recording_on_a_gpu_needs_the_bindings_and_running_none(here: Any) -> None:
    targets = here((H200,), lacking=("cuda",))
    assert targets["cuda"].not_built == "recording on a GPU needs cuda-bindings, which is not installed"
    assert (targets["cuda"].not_run, targets["sm_90"].not_run, targets["sm_90"].recorder) == ("", "", "cross-compile")


def test_doctor_and_targets_say_it_in_words_and_as_json(here: Any) -> None:
    here()
    result = call("doctor")
    assert result.exit_code == 0 and "cgcompile" in result.stdout and "none: no CUDA driver" in result.stdout
    assert re.search(r"^sm_90 +yes, cross-compiled +no$", result.stdout, re.MULTILINE)
    assert "not run here: " + ", ".join([row.name for row in ARCHES]) + ": no CUDA driver (libcuda.so.1)\n" in result.stdout
    plain = json.loads(call("doctor", "--json").stdout)
    assert {"parts", "processor", "gpus", "driver", "cache", "targets"} <= set(plain)
    rows = json.loads(call("targets", "--json").stdout)
    assert rows == plain["targets"] and rows[0] == {"built_here": True, "run_here": True} | rows[0]
    shown = [line.split() for line in call("targets").stdout.splitlines()]
    assert shown[0][:2] == ["target", "for"] and shown[-1][0] == ARCHES[-1].name and shown[-1][-2:] == ["yes", "no"]


# --- the cache ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Result_:
    data: bytes


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a cache with two results of one stage, one of another stage, and files of other programs."""
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "cache"))
    for stage, name in (("kernels", "a"), ("kernels", "b"), ("lowered", "c")):
        remember(tmp_path / "cache" / stage / digest(name), Result_(data=bytes(100)))
    (tmp_path / "cache/kernels/.new-killed").write_bytes(b"cgc")
    (tmp_path / "cache/kernels/notes.txt").write_text("mine")
    (tmp_path / "cache/kernels" / digest("foreign")).write_text("not a result")
    (tmp_path / "cache/other.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    remember(tmp_path / "elsewhere" / digest("d"), Result_(data=b""))
    (tmp_path / "cache/link").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "cache"


def test_the_folder_is_told_and_how_much_is_in_it(cache: Path) -> None:
    assert [(row.stage, row.files) for row in kept()] == [("kernels", 3), ("lowered", 1)]
    result = call("cache", "dir")
    assert (result.exit_code, result.stdout) == (0, f"{cache}\n") and result.stderr.startswith("4 files, ")
    plain = json.loads(call("cache", "dir", "--json").stdout)
    assert (plain["path"], plain["files"], list(plain["stages"])) == (str(cache), 4, ["kernels", "lowered"])
    assert plain["bytes"] == sum(stage["bytes"] for stage in plain["stages"].values()) > 300


def test_our_own_files_are_removed_and_no_others(cache: Path) -> None:
    result = call("cache", "clean")
    assert (result.exit_code, result.stdout) == (0, "") and result.stderr.startswith(f"{cache}: removed 4 files, ")
    left = {str(path.relative_to(cache)) for path in cache.rglob("*") if not path.is_dir() or path.is_symlink()}
    assert left == {"kernels/notes.txt", f"kernels/{digest('foreign')}", "other.txt", "link"}
    assert len(list((cache.parent / "elsewhere").iterdir())) == 1 and not (cache / "lowered").exists()
    assert call("cache", "clean").stderr == f"{cache}: removed nothing: it was empty\n"


def test_a_cache_that_is_not_there_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "nowhere"))
    assert call("cache", "dir").stderr == "empty\n" and json.loads(call("cache", "clean", "--json").stdout)["files"] == 0
    assert not (tmp_path / "nowhere").exists()


def test_a_cache_of_anothers_is_not_touched(cache: Path) -> None:
    cache.chmod(0o777)
    with raises("cache-unsafe"):
        kept()
    result = call("cache", "clean")
    assert result.exit_code == 2 and "others can write" in result.stderr and (cache / "lowered").exists()
