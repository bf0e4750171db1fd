"""Models from folders of language models: checks the arguments, and derives defaults from the folder and the GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import BuildError
from ..targets.choice import Options, is_cpu
from ..targets.requirements import has_driver
from ..util.disk_space import size
from ..util.model_file import kind_of
from ..util.progress import Stages

NEEDED = ("transformers", "triton")
EXTRA = "pip install 'transformers>=5' 'triton>=3.6,<3.8'"
"""What `cgcompile.language_models` needs beside torch, and the command that installs it (the extras `llm` and `compile`)."""

BY_HAND = "write a model file with cgcompile.language_models.causal_lm"

GPU_MEMORY = """
import ctypes
driver, device, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_size_t()
if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
print(total.value)
"""
"""Prints the bytes of the first GPU's memory.  Runs in a subprocess, because a process that has started CUDA cannot fork new
models."""


def check_weights(options: Options) -> None:
    """Raises option-invalid for quantized weights that the target or the dtype does not support."""
    if options.weights is None:
        return
    if options.weights != "int8":
        raise BuildError("option-invalid", f"weights {options.weights!r}: expected int8")
    if gpu_memory(options) is not None:
        problem = f"weights int8: for processors, and the target is {options.target}"
        raise BuildError("option-invalid", problem, "add --target cpu, or leave --weights out")
    if options.dtype not in (None, "float32"):
        problem = f"weights int8: calls compute in float32, and the dtype is {options.dtype}"
        raise BuildError("option-invalid", problem, "leave --dtype out")


def is_folder(model: Any) -> bool:
    """Whether the model is a folder in the Hub's layout.  Raises source-missing."""
    return isinstance(model, str | os.PathLike) and kind_of(os.fspath(model)) == "folder"


def is_gguf(model: Any) -> bool:
    """Whether the model is the path of a GGUF file."""
    return isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".gguf")


def gguf_place(model: Any, parent: Path, force: bool) -> Path:
    """Returns the folder in `parent` for the converted GGUF file; it has the file's name.  Raises the errors of `check_gguf`."""
    from ..language_models.gguf_file import check_gguf  # late: only GGUF files need it

    folder = parent / Path(model).stem
    check_gguf(os.fspath(model), folder, force)
    return folder


def write_gguf(model: Any, folder: Path, stages: Stages) -> None:
    """Converts a GGUF file to a folder.  Raises folder-invalid."""
    with stages("gguf") as tell:
        tell("transformers")
        from ..language_models.gguf_file import write_folder

        write_folder(os.fspath(model), folder)
        tell.result(f"weights as float32, configuration and tokenizer in {folder}")


def check_folder_options(model: Any, options: Options) -> None:
    """Raises option-invalid for options that do not fit the kind of model, extra-missing, and folder-invalid for errors in the
    folder's files."""
    if not is_folder(model):
        for name, value in options.of_folders().items():
            if value:
                problem = f"{name} is for the folder of a language model, and this model is none"
                raise BuildError("option-invalid", problem, f"leave {name} out, or give a folder with config.json")
        return
    for name, value in options.of_models().items():
        if value:
            problem = f"{name} is for model files, and {os.fspath(model)} is the folder of a language model"
            remedy = "give --context and --lanes" if name == "--sizes" else f"leave it out, or {BY_HAND}"
            raise BuildError("option-invalid", problem, remedy)
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            problem = f"building a folder needs {package}, of the extra llm, which is not installed"
            raise BuildError("extra-missing", problem, EXTRA)
    from ..language_models.folder import read_folder  # late: only these folders need it
    from ..language_models.settings import check_settings

    check_settings(read_folder(os.fspath(model)), options)


def folder_model(model: Any, options: Options) -> tuple[Any, Options]:
    """Returns the `model.source.Recipe` of a folder, which is a model for `build` and `check`, and the options with its
    sizes."""
    with Stages(options.progress)("folder") as tell:
        tell("transformers")
        from ..language_models.recipe import language_model  # late: it imports transformers

        recipe, settings = language_model(os.fspath(model), options, gpu_memory(options))
        lanes = ", ".join(map(str, settings.lanes))
        pages = " to ".join(dict.fromkeys([str(settings.pages), str(settings.most_pages)]))
        cache = f"a load takes {pages} pages of cache ({size(settings.page_bytes)} each)"
        stored = f", weights {options.weights}" if options.weights else ""
        adapters = f", {settings.adapters} adapters of rank {settings.rank}" if settings.adapters else ""
        tell.result(f"{settings.dtype}{stored}, texts of up to {settings.context} tokens, lanes {lanes}{adapters}; {cache}")
    return recipe, replace(options, sizes=settings.sizes)


def gpu_memory(options: Options) -> int | None:
    """Returns the bytes of the target GPU's memory, or None for processors.  For one target this is the memory of this machine's
    GPU, whatever its architecture.  Returns 0 without a GPU here, and for several targets."""
    targets = options.targets
    if all(map(is_cpu, targets)):
        return None
    memory = memory_here() if len(targets) == 1 else 0
    return None if targets == ["auto"] and not memory and options.record != "cross-compile" else memory


def memory_here() -> int:
    """Returns the bytes of memory of this machine's first GPU, or 0 without one."""
    if has_driver():
        with suppress(OSError, ValueError, subprocess.TimeoutExpired):
            completed = subprocess.run([sys.executable, "-c", GPU_MEMORY], capture_output=True, text=True, check=False, timeout=60)
            return int(completed.stdout)
    return 0
