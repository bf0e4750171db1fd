"""Finds out what is installed and which targets can be built and run on this machine, fast and without importing torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from cgbundle.cpu import libtorch
from cgbundle.cpu.machine import processor_flags, processor_name
from cgbundle.errors import CgbundleError

from ..targets.architectures import ARCHES
from ..targets.instruction_sets import LEVELS, Level, check_level, foreign
from ..targets.requirements import BINDINGS, DRIVER, EXTRA, check_compiler, check_packages, compiler, installed
from ..util.version import VERSION

LEVEL_NAMES = {
    "x86-64-v2": "x86 processors with SSE4.2", "x86-64-v3": "x86 processors with AVX2 and FMA",
    "x86-64-v4": "x86 processors with AVX-512", "armv8-a": "64-bit Arm processors",
    "armv8.2-a": "64-bit Arm processors with LSE (Graviton2, Ampere Altra and later)",
}  # fmt: skip
"""Descriptions of the processor levels."""

MAJOR, MINOR = 75, 76
"""The attributes of cuDeviceGetAttribute for the compute capability (CUdevice_attribute in cuda.h)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A package or tool.  `version`: its version and path, "" if it is missing; `use`: its purpose; `fix`: how to install it."""

    name: str
    version: str
    use: str
    fix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU that the CUDA driver reports.  `arch`: such as "sm_90"; `memory`: bytes."""

    name: str
    arch: str
    memory: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetHere:
    """A target on this machine.  `about`: the machines that it is for.  `not_built` and `not_run`: why it cannot be built or run
    here, "" if it can; `fix`: a remedy for `not_built`, else for `not_run`, or "".  `recorder`: its recorder, "" if it cannot be
    built.  `standalone`: whether bundles that need no torch libraries run here, even if `not_run` is not ""."""

    name: str
    about: str
    not_built: str
    not_run: str
    recorder: str
    fix: str
    standalone: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """This machine.  `gpus_missing`: why no GPU is visible.  `driver`: the CUDA version that the driver supports, "13.0", or ""."""

    parts: tuple[Part, ...]
    processor: str
    gpus: tuple[Gpu, ...]
    gpus_missing: str
    driver: str
    targets: tuple[TargetHere, ...]


def environment() -> Environment:
    """Inspects this machine: packages, compiler, CUDA driver."""
    gpus, driver, missing = _gpus()
    flags = processor_flags()
    level = max([row.name for row in LEVELS if set(row.features) <= flags], default="")
    cores = len(os.sched_getaffinity(0))
    return Environment(
        parts=_parts(),
        processor=f"{processor_name()}, {cores} core{'' if cores == 1 else 's'}" + (f", {level}" if level else ""),
        gpus=gpus,
        gpus_missing=missing,
        driver=driver,
        targets=(_processors("cpu", "processors like this one", None), *[_level(row) for row in LEVELS], *_cuda(gpus, missing)),
    )


def _parts() -> tuple[Part, ...]:
    python = f"{platform.python_version()}, {sys.executable}"
    return (
        Part(name="cgcompile", version=f"{VERSION}, {Path(__file__).parents[1]}", use="", fix=""),
        Part(name="python", version=python, use="", fix=""),
        _package(
            "torch",
            "building, and running bundles for processors; a build for the CPU is enough without a GPU",
            EXTRA,
            _cuda_of_torch(),
        ),
        _package("numpy", "building", EXTRA),
        _package("triton", "building for GPUs", EXTRA),
        Part(name="C++ compiler", version=_compiler(), use="building for processors", fix="install g++, or set CXX"),
        _package("cuda-bindings", "recording bundles on a GPU", BINDINGS),
        _package("cryptography", "signing, and checking signatures", "pip install 'cryptography>=43'"),
    )


def _package(name: str, use: str, fix: str, more: str = "") -> Part:
    version = installed(name)
    return Part(name=name, version=version + more if version else "", use=use, fix="" if version else fix)


def _cuda_of_torch() -> str:
    """Returns ` (CUDA 13.0)` or ` (without CUDA)` from the text of torch/version.py, because importing it would import torch."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return ""
    match = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)", file.read_text(), re.MULTILINE)
    return f" (CUDA {match[1]})" if match else " (without CUDA)"


def _compiler() -> str:
    path = shutil.which(compiler())
    if path is None:
        return ""
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        output = ""
    return ", ".join([*output.splitlines()[:1], path])


def _gpus() -> tuple[tuple[Gpu, ...], str, str]:
    """Returns the GPUs, the driver's version, and why there is no GPU.  Calls the driver through ctypes, because torch and
    cuda-bindings may not be installed."""
    try:
        cuda = ctypes.CDLL(DRIVER)
    except OSError:
        return (), "", f"no CUDA driver ({DRIVER})"
    version, count = ctypes.c_int(), ctypes.c_int()
    error = cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version)) or cuda.cuDeviceGetCount(ctypes.byref(count))
    driver = f"{version.value // 1000}.{version.value % 1000 // 10}" if version.value else ""
    if error or not count.value:
        return (), driver, f"the CUDA driver shows no GPU (cuInit: error {error})" if error else "the CUDA driver shows no GPU"
    return tuple([_gpu(cuda, index) for index in range(count.value)]), driver, ""


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    name, memory, major, minor = ctypes.create_string_buffer(128), ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetName(name, len(name), index)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), index)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, index)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, index)
    return Gpu(name=name.value.decode(errors="replace"), arch=f"sm_{major.value}{minor.value}", memory=memory.value)


# --- targets ------------------------------------------------------------------------------------------------------


def _level(row: Level) -> TargetHere:
    return _processors(row.name, LEVEL_NAMES[row.name], row)


def _processors(name: str, about: str, level: Level | None) -> TargetHere:
    machine, flags = os.uname().machine, processor_flags()

    def fits() -> None:
        if level is not None:
            check_level(level, machine, flags)

    built = _refusal(lambda: check_packages("host"), check_compiler, fits)
    foreign_reason = foreign(level, machine, flags) if level is not None else ""
    missing, remedy = ("", "") if foreign_reason else _refusal(lambda: libtorch.find(""))
    return TargetHere(
        name=name, about=about, not_built=built[0], not_run=foreign_reason or missing, recorder="" if built[0] else "host",
        fix=built[1] or remedy, standalone=not foreign_reason,
    )  # fmt: skip


def _cuda(gpus: tuple[Gpu, ...], missing: str) -> list[TargetHere]:
    """Returns the rows of `cuda` and of every architecture.  An unknown architecture of a GPU here also has a row, because bundles
    for it can be captured."""
    local_arches = [gpu.arch for gpu in gpus]
    known_arches = [row.name for row in ARCHES]
    descriptions = {row.name: f"{row.gpu} and other GPUs of {row.major}.{row.minor}" for row in ARCHES}
    unknown_arches = {gpu.arch: gpu.name for gpu in gpus if gpu.arch not in known_arches}
    captured = _refusal(lambda: check_packages("capture"))
    if not gpus:
        captured = missing, "name the GPU that the bundle is for: --target sm_90, or another"
    elif not captured[0] and "without CUDA" in _cuda_of_torch():
        remedy = "install torch with CUDA, or name a GPU architecture (--target sm_90) to cross-compile"
        captured = "torch is installed without CUDA", remedy
    rows = [
        TargetHere(
            name="cuda", about="the GPU of this machine", not_built=captured[0], not_run=missing,
            recorder="" if captured[0] else "capture", fix=captured[1],
        )
    ]  # fmt: skip
    for name, about in (descriptions | unknown_arches).items():
        unknown = "cgcompile does not know this architecture"
        traced = _refusal(lambda: check_packages("cross-compile")) if name in descriptions else (unknown, "")
        capturing = name in local_arches[:1] and not captured[0]
        built = ("", "") if capturing else traced
        absent = missing or ("" if name in local_arches else f"the GPU here is {', '.join(dict.fromkeys(local_arches))}")
        recorder = "capture" if capturing else "" if built[0] else "cross-compile"
        rows.append(TargetHere(name=name, about=about, not_built=built[0], not_run=absent, recorder=recorder, fix=built[1]))
    return rows


def _refusal(*checks: Callable[[], object]) -> tuple[str, str]:
    """Returns text and hint of the first check that fails, ("", "") if all pass."""
    for check in checks:
        try:
            check()
        except CgbundleError as error:
            return str(error), error.hint
    return "", ""
