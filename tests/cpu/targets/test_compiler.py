"""The compiler script for Inductor: how it changes options, and what it records."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cgcompile.targets.cpu import compiler
from cgcompile.targets.cpu.compiler import HEADER, INTERFACE, wrap
from cgcompile.targets.instruction_sets import level_of
from tests.helpers.raising import raises

GIVEN = ["-O3", "-march=native", "-fPIC", "-mavx512f", "-mavx512vnni", "-c", "-o", "a b.o"]


@pytest.fixture(autouse=True)
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets CXX to a compiler that prints its arguments, one per line."""
    path = tmp_path / "g++ 12"
    path.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))


def called(path: Path, *arguments: str) -> list[str]:
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_level_is_all_that_the_code_is_compiled_for(tmp_path: Path) -> None:
    wrapper = wrap(tmp_path / "compiler", level_of("x86-64-v3"))
    kept = [] if "AOTInductorGetLastError" in INTERFACE.read_text() else ["-DCGCOMPILE_KEEPS_ERRORS"]
    silent = ["-include", str(HEADER), *kept]
    assert called(wrapper.path, "m.cpp", *GIVEN) == ["m.cpp", "-O3", "-march=x86-64-v3", *silent, "-fPIC", "-c", "-o", "a b.o"]
    assert called(wrapper.path, "m.S", *GIVEN) == ["m.S", "-O3", "-march=x86-64-v3", "-fPIC", "-c", "-o", "a b.o"]
    assert called(wrapper.path, "--version") == ["--version"]
    assert wrapper.options() == [("-march=x86-64-v3",)]
    assert wrapper.path.name == "g++ 12", "Inductor tells compilers apart by their names"


def test_native_code_is_what_inductor_says_less_what_one_maker_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.os, "uname", lambda: type("Uname", (), {"machine": "x86_64"}))
    wrapper = wrap(tmp_path / "compiler", None)
    off = ["-mno-sse4a", "-mno-xop", "-mno-fma4", "-mno-tbm"]
    arguments = called(wrapper.path, "m.cpp", *GIVEN)
    assert arguments[:7] == ["m.cpp", "-O3", "-march=native", *off] and arguments[-6:] == GIVEN[2:]
    called(wrapper.path, "m.cpp", "-march=native", "-o", "probe.so")
    assert wrapper.options() == [("-march=native", *off, "-mavx512f", "-mavx512vnni")], "a probe is no code of the bundle"
    monkeypatch.setattr(compiler.os, "uname", lambda: type("Uname", (), {"machine": "aarch64"}))
    arm = wrap(tmp_path / "arm", None)
    assert called(arm.path, "m.S", "-march=armv9-a+sve2", "-msve-vector-bits=256", "-c") == [
        "m.S", "-march=armv9-a+sve2", "-msve-vector-bits=256", "-c"
    ]  # fmt: skip


def test_a_compiler_that_was_never_called_is_noticed(tmp_path: Path) -> None:
    with raises("torch-unsupported", match="Inductor did not call the compiler that it was given"):
        wrap(tmp_path / "compiler", None).options()


def test_without_a_way_to_ask_for_the_text_of_an_error_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interface.h").write_text("AOTIRuntimeError AOTInductorModelContainerRun();")
    monkeypatch.setattr(compiler, "INTERFACE", tmp_path / "interface.h")
    assert "-DCGCOMPILE_KEEPS_ERRORS" in called(wrap(tmp_path / "compiler", level_of("x86-64-v2")).path, "m.cpp", *GIVEN)
