"""Inductor's compilations: in parallel, with errors reported and no process left; and instruction sets without probes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from cgbundle.cpu.machine import processor_flags
from cgcompile.targets.cpu.aoti import compile_cpu
from cgcompile.targets.cpu.compilations import unprobed
from cgcompile.targets.cpu.compiler import HEADERS, ask_compilers, wrap
from cgcompile.targets.instruction_sets import level_of
from tests.helpers.raising import raises

COMPILER = """#!/bin/sh
case "$*" in
  *.kernel.cpp*) echo $$ >> {pids}; exec sleep 600 ;;
  *.wrapper.cpp*) while [ ! -s {pids} ]; do sleep 0.01; done; exit 1 ;;
  *) exec g++ "$@" ;;
esac
"""
"""A compiler that never ends for one file, and fails for the other."""


def test_a_compilation_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the second attempt, without vectors, which does not wait for processes of the first one."""
    path, pids = tmp_path / "g++", tmp_path / "pids"
    path.write_text(COMPILER.format(pids=pids))
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),))
    began, messages = time.monotonic(), list[str]()
    with raises("compiler-failed", match="the C\\+\\+ compiler refuses the code"):
        compile_cpu(program, tmp_path, messages.append)
    assert time.monotonic() - began < 300 and "the C++ compiler refuses the vectorized code: again without vectors" in messages
    assert not [pid for pid in pids.read_text().split() if Path(f"/proc/{pid}").exists()]


@pytest.mark.skipif(os.uname().machine != "x86_64" or "avx2" not in processor_flags(), reason="needs AVX2")
def test_instruction_sets_are_those_that_the_compiler_is_told_to_use(tmp_path: Path) -> None:
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    vector_isas = {}
    for name in ("x86-64-v3", "native"):
        wrapped = wrap(tmp_path / name, level_of(name))
        with unprobed(ask_compilers(str(wrapped.path), level_of(name))):
            vector_isas[name] = [str(isa).split() for isa in valid_vec_isa_list()]
    assert [flag for flags in vector_isas["native"] for flag in flags if flag != "avx512" and flag not in processor_flags()] == []
    assert not any("avx512_vnni" in flags or "amx_tile" in flags for flags in vector_isas["x86-64-v3"])
    assert any("avx512_vnni" in flags for flags in vector_isas["native"]) == ("avx512_vnni" in processor_flags())


DEVICES = ["cpu", "cuda", "cuda:0", "cuda:12", "xpu:1", "mps", "", "gpu", "cpu:", "cuda:x", "cuda:1x", "cuda:1:2", "cpux", ":1"]

PROGRAM = """
#include <regex>
#include <cstdio>
int main(int count, char** given) {
  for (int i = 1; i < count; i++) {
    std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");
    std::smatch sm;
    std::string device = given[i];
    bool matched = std::regex_match(device, sm, re);
    printf("%d %s %s\\n", matched, matched ? sm[1].str().c_str() : "", matched && sm[3].matched ? sm[3].str().c_str() : "");
  }
}
"""


def test_the_header_reads_devices_as_the_standard_one_does(tmp_path: Path) -> None:
    (tmp_path / "devices.cpp").write_text(PROGRAM)
    said = []
    for folder in (["-I", str(HEADERS)], []):
        executable = tmp_path / f"devices{len(said)}"
        subprocess.run(["g++", "-std=c++17", *folder, "-o", executable, tmp_path / "devices.cpp"], check=True)
        said.append(subprocess.run([executable, *DEVICES], capture_output=True, text=True, check=True).stdout)
    assert said[0] == said[1] and said[0].count("1 ") == 6
