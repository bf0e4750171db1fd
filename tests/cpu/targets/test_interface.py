"""The C interface of compiled models: it is compiled once and cached, and removed from generated files unless its compilation
fails."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from cgcompile.targets.cpu.aoti import compile_cpu
from cgcompile.targets.cpu.interface import DEFINED, FIRST, TEXT, begun_interface
from tests.helpers.raising import raises

COMPILER = """#!/bin/sh
case "$*" in *interface.cpp) {interface} ;; esac
for each do
  case $each in *.wrapper.cpp) grep -c AOTInductorModelContainerCreateWithDevice "$each" >> {log}
    case "$*" in *std=c++17*) echo older >> {log} ;; esac
    exit 1 ;;
  esac
done
exec g++ "$@"
"""
"""A compiler that refuses the model's file and logs whether it contains the interface, and its C++ standard."""

MADE = """while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo object > "$2"; echo made >> {log}; fi; shift; done; exit 0"""

Log = Callable[[], list[str]]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Log]:
    """Returns a function that sets CXX to a compiler with the action `interface` for the interface. That function returns one that
    reads the log."""
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "cache"))
    path, log = tmp_path / "g++", tmp_path / "log"

    def write(interface: str) -> Log:
        path.write_text(COMPILER.format(log=log, interface=interface.format(log=log)))
        path.chmod(0o700)
        monkeypatch.setenv("CXX", str(path))
        return lambda: log.read_text().split() if log.exists() else []

    return write


def contents() -> bytes | None:
    with begun_interface() as interface:
        assert interface is not None
        path = interface.object_file.result()
        return None if path is None else path.read_bytes()


def test_it_is_compiled_once_and_again_when_what_was_kept_is_damaged(compiler: Callable[[str], Log], tmp_path: Path) -> None:
    log = compiler(MADE)
    assert (contents(), contents(), log()) == (b"object\n", b"object\n", ["made"])
    (entry,) = (tmp_path / "cache" / "interface").iterdir()
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    assert (contents(), contents(), log()) == (b"object\n", b"object\n", ["made", "made"])


def test_another_compiler_compiles_it_again(
    compiler: Callable[[str], Log], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(MADE)
    contents()
    other = tmp_path / "other"
    other.write_text((tmp_path / "g++").read_text().replace("exec g++", "echo other version; exec g++").replace("object", "newer"))
    other.chmod(0o700)
    monkeypatch.setenv("CXX", str(other))
    assert contents() == b"newer\n"


def test_it_is_compiled_by_every_build_where_nothing_can_be_kept(
    compiler: Callable[[str], Log], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler(MADE)
    (tmp_path / "file").touch()
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "file" / "cache"))
    assert (contents(), contents(), log()) == (b"object\n", b"object\n", ["made", "made"])


def test_a_compiler_that_cannot_compile_it_and_none(compiler: Callable[[str], Log], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler("exit 1")
    assert contents() is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    with begun_interface() as interface:
        assert interface is None


def test_a_build_that_ends_before_leaves_no_process(compiler: Callable[[str], Log], tmp_path: Path) -> None:
    compiler(f"echo $$ > {tmp_path}/pid; exec sleep 100")
    with begun_interface() as interface:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
    assert interface is not None and interface.object_file.result() is None
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


COMMAND = shlex.split(f"g++ x.wrapper.cpp -D {' -D  '.join(DEFINED[:-1])} -D CPU_CAPABILITY_AVX2 -O1 -D{DEFINED[-1]} -c -o x.o")


@pytest.mark.parametrize(
    ("command", "copies", "taken"),
    [(COMMAND, 1, True), ([*COMMAND, "-D", "USE_CUDA"], 1, False), ([*COMMAND, "-DUSE_CUDA"], 1, False), (COMMAND, 0, False),
     (COMMAND[:2] + COMMAND[4:], 1, False), (COMMAND, 2, False)],
)  # fmt: skip
def test_it_is_taken_out_where_it_is_compiled_alike(
    compiler: Callable[[str], Log], command: list[str], copies: int, taken: bool
) -> None:
    compiler(MADE)
    source = FIRST + TEXT.read_text() * copies + "namespace torch {}\n"
    with begun_interface() as interface:
        assert interface is not None
        rest = interface.without(source, command)
    assert (rest is not None) == taken
    if rest is not None:
        assert rest.startswith(FIRST) and rest.endswith("namespace torch {}\n") and "model_container.h" not in rest
        assert "#include <" in rest and "extern" not in rest


def test_what_inductor_writes_has_it_and_is_compiled_whole_where_the_rest_alone_is_refused(
    compiler: Callable[[str], Log], tmp_path: Path
) -> None:
    log = compiler(MADE)
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),))
    (work := tmp_path / "work").mkdir()
    with raises("compiler-failed", match="the C\\+\\+ compiler refuses the code"):
        compile_cpu(program, work, lambda text: None)
    apart, older, whole, *again = [line for line in log() if line != "made"][:4]
    assert (apart, older) == ("0", "older") and int(whole) > 0
    assert ("older" in again) == (torch.__version__ < "2.13"), "as Inductor would compile it"
