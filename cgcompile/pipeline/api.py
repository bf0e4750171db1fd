"""Defines `build` and `check`, the public functions of cgcompile.  torch is imported when one of them runs."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..capture.processes import recorder_processes
from ..export.paths import MAX_PATHS
from ..model.declared_sizes import Inputs, SizesOption
from ..targets.choice import MAX_KEYS, PROVE_BUDGET, Options, asks_gpu
from ..util.garbage_collection import quick_imports, seldom_collected
from ..util.progress import Progress, Stages, Watcher, watcher
from .argument_checks import check_build, check_check
from .folders import folder_model, gguf_place, is_folder, is_gguf, write_gguf
from .records import Built, Report

TRACE = "torch.__trace"
"""The logger to which torch prints every graph (torch 2.11, 2.13).  Its handler removes itself at the first record, unless
TORCH_TRACE names a folder.  With a filter, the handler would get no record and stay, and the build would take 5% longer."""


@contextmanager
def with_torch(progress: Watcher, module: str) -> Iterator[None]:
    """Imports torch and the module `module` of cgcompile, and runs the body without warnings from torch.export and Inductor.  The
    imports take seconds, so the watcher gets an event before them."""
    with warnings.catch_warnings(), seldom_collected():
        warnings.filterwarnings("ignore", module=r"torch\.|copyreg")
        warnings.filterwarnings("ignore", "The tensor attribute.* assigned during export")  # every LSTM; its module is contextlib
        if "torch" not in sys.modules:
            with Stages(progress)("import") as tell, quick_imports():
                tell("torch")
                import torch

                import_module(module)
                tell.result(f"torch {torch.__version__}")
        with _torch_logs_muted():
            yield


@contextmanager
def _torch_logs_muted() -> Iterator[None]:
    """Filters out what torch's handlers log to stderr.  If torch refuses a model, the error contains the same text.  If the user
    sets TORCH_LOGS, nothing is filtered."""
    logger_names = [] if os.environ.get("TORCH_LOGS") else [*logging.root.manager.loggerDict]
    loggers = [name for name in logger_names if name.startswith("torch") and name != TRACE]
    handlers = [handler for name in loggers for handler in logging.getLogger(name).handlers]
    only_cgcompile = logging.Filter("cgcompile")  # passes only records of loggers with this name
    for handler in handlers:
        handler.addFilter(only_cgcompile)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(only_cgcompile)


def build(
    model: Any,
    inputs: Inputs | None = None,
    *,
    sizes: SizesOption = (),
    out: str | os.PathLike[str] | None = None,
    target: str = "auto",
    strict: bool = False,
    allow: Sequence[str] = (),
    lower: str = "inductor",
    specialize: str = "size",
    record: str = "auto",
    prove: str = "interpret",
    prove_budget: float = PROVE_BUDGET,
    autotune: bool = False,
    autotune_timeout: float | None = None,
    train: bool = False,
    fallback_ops: Sequence[str] = (),
    standalone: bool | None = None,
    force: bool = False,
    max_keys: int = MAX_KEYS,
    max_paths: int = MAX_PATHS,
    donations: Sequence[tuple[str, str]] = (),
    state: Mapping[str, Any] = MappingProxyType({}),
    world: int | None = None,
    split: str | None = None,
    context: int | None = None,
    lanes: Sequence[int] | str = (),
    chunk: Sequence[int] | str = (),
    dtype: str | None = None,
    weights: str | None = None,
    adapters: int = 0,
    adapter_rank: int | None = None,
    progress: Progress = None,
) -> Built:
    """Builds a bundle and publishes it at `out` (default: the model's name + `.cgb` in the current folder).

    What is built:

    - `model`: a path of a model.py, `package.module:attribute`, a path of a saved .pt2, the folder of a language model
      (config.json, safetensors and a tokenizer, as on the Hub), a .gguf file (it becomes such a folder beside `out`), or a module.
    - `inputs`: for a module, the function that makes its example inputs, or a dict from methods to such functions.
    - `sizes`: sizes of the declared dimensions: [1, 8, 32], {"batch": [1, 8], "seq": [128]}, or by entry {"decode": [1, 8]}.
    - `target`: auto, cuda, cpu (processors like this one), a GPU architecture (sm_90), or a level of processors (x86-64-v3,
      armv8-a).  Several, "sm_80,sm_90,x86-64-v3", make one bundle with a variant for each; GPU variants are cross-compiled.
    - `donations`: pairs of an output of one entry and an input that reads it in place, such as
      ("prefill.hidden", "decode.hidden").  A model file has a function `donations` instead.
    - `state`: buffers whose number of rows a load chooses: {"keys_*": "pages"}, or {"keys_*": ("pages", 4096)} with the maximum
      number of rows.  A model file has a function `state` instead.
    - `train`: keeps a model in training mode instead of calling eval().  A module in memory has its earlier mode after the build.

    How it is built:

    - `lower`: eager, inductor or max-autotune; for the cpu target only inductor.
    - `autotune`: builds with each value of `lower`, and once with Triton kernels only, on the GPU that the bundle is for.  It
      verifies and times these lowerings, and keeps the fastest at every int_key.  `autotune_timeout`: seconds after which the
      search ends with the lowerings that are ready.
    - `specialize`: "size" lowers every int_key separately, "shared" all together with dynamic shapes (fewer images, slower
      kernels).
    - `record`: capture (on a GPU of this machine), cross-compile (without a GPU), or auto.
    - `prove`: interpret or none, for a cross-compiled bundle; other bundles are replayed.  `prove_budget`: seconds after which the
      interpreter stops.  The smallest int_key is always verified; the build lists the others.
    - `fallback_ops`: operators that run on the host between two graphs, such as "mylib::op".
    - `standalone`: whether a CPU bundle contains all functions that its code calls, so that it serves without torch.  None: if
      possible.  True: the build fails if it is not, and names the function.  False: the code calls torch's libraries.
    - `world`: the number of GPUs of one host that share the model, 2 to 8.  `model(rank, world)` of the model file returns a share,
      and `forward` calls functional collectives of torch.distributed.  Such a bundle is always cross-compiled.
    - `split`: "layers" distributes the layers of a plain `model()` over these GPUs, about the same bytes on each.  One GPU works
      at a time.

    What stops a build:

    - `strict`: operations that would run on the host are errors.
    - `allow`: rules whose findings are allowed; the manifest names them.  A finding that refuses the build cannot be allowed.
      "mismatched-integers" allows integers that rounding changes.  Indices that select another of several equal floats are
      allowed without this option.
    - `max_keys`: the maximum number of int_keys.  `max_paths`: the maximum number of paths through the model's Python code (`if`,
      `while`, `assert` on tensors).
    - `force`: replaces an existing bundle.

    The build of a language model's folder compares a small copy of the model with transformers.  It raises
    language-model-refused if their texts differ.  Such a build takes these options instead of `sizes`:

    - `context`: tokens of the longest text.  Default: the model's, at most 8192 on a GPU and 2048 on a CPU.
    - `lanes`: how many texts share a call.  Default: 1, 8 and 32, on a CPU 1 and 4.
    - `chunk`: how many tokens of prompts a call reads, in multiples of 64.  A call reads several prompts if the model caches only
      keys and values.  Default: 128 and 512, on a CPU 64.
    - `dtype`: bfloat16, float16 or float32.  Default: that of config.json, on a CPU float32.
    - `weights`: "int8" stores weights in 8 bits with a scale for every row, for a CPU.  Calls compute in float32.
    - `adapters`: how many LoRA adapters a loaded bundle holds; each text of a call names its own.  Default: none.
      `adapter_rank`: their largest rank.  Default: 16.

    `progress`: a function that takes an `Event`, "bar" (on stderr), "silent", or None, which shows progress if stderr is a terminal
    or a notebook.

    One build at a time writes to `out`: a second one raises output-busy.  A process that reads the path gets the old or the new
    bundle.  After an exception, also KeyboardInterrupt, no files and no processes are left.  The command turns SIGTERM and SIGHUP
    into an exception.  If your program does not, the next build removes the unfinished bundle.

    Raises a CgbundleError, mostly a BuildError, and then publishes nothing.  The page "Errors" lists all codes (`error.code`).
    """
    with watcher(progress) as tell:
        if is_gguf(model):
            model = _folder_of(model, Path("" if out is None else out).parent, force, tell)
        options = Options(
            sizes=sizes, out=out, target=target, strict=strict, allow=tuple(allow), lower=lower, specialize=specialize,
            record=record, prove=prove, prove_budget=prove_budget, autotune=autotune, autotune_timeout=autotune_timeout,
            train=train, fallback_ops=tuple(fallback_ops), standalone=standalone, force=force, max_keys=max_keys,
            max_paths=max_paths, donations=donations, state=dict(state), world=world, split=split, context=context, lanes=lanes,
            chunk=chunk, dtype=dtype, weights=weights, adapters=adapters, adapter_rank=adapter_rank, progress=tell,
        )  # fmt: skip
        check_build(model, inputs, options)
        if is_folder(model):
            with with_torch(tell, f"{__package__}.build"):
                model, options = folder_model(model, options)
        if world is not None:
            with with_torch(tell, f"{__package__}.world.build"):
                from .world.build import build_world  # late: it imports torch

                return build_world(model, options)
        if len(options.targets) > 1:
            with with_torch(tell, f"{__package__}.variants"):
                from .variants import build_variants  # late: it imports torch

                return build_variants(model, inputs, options)
        with ExitStack() as stack:
            early = record != "cross-compile" and asks_gpu(target)
            # the fork server of the recorders imports torch at the same time
            recorders = stack.enter_context(recorder_processes()) if early else None
            stack.enter_context(with_torch(tell, f"{__package__}.build"))
            from .build import build as run  # late: it imports torch

            return run(model, inputs, options, recorders)


def _folder_of(model: Any, parent: Path, force: bool, tell: Watcher) -> Path:
    """Converts a GGUF file to a model folder.  Raises source-missing, folder-invalid, extra-missing, output-exists."""
    folder = gguf_place(model, parent, force)
    with with_torch(tell, f"{__package__}.build"):
        write_gguf(model, folder, Stages(tell))
    return folder


def check(
    model: Any,
    inputs: Inputs | None = None,
    *,
    sizes: SizesOption = (),
    target: str = "auto",
    strict: bool = False,
    fallback_ops: Sequence[str] = (),
    train: bool = False,
    max_paths: int = MAX_PATHS,
    context: int | None = None,
    lanes: Sequence[int] | str = (),
    chunk: Sequence[int] | str = (),
    dtype: str | None = None,
    weights: str | None = None,
    adapters: int = 0,
    adapter_rank: int | None = None,
    progress: Progress = None,
) -> Report:
    """Reports all findings for a model, and the regions that a build would make.  Builds nothing, and needs no GPU.

    `model`, `inputs` and `sizes` as for `build`; the check assumes sizes for a dimension that has none.  `target`: as for
    `build`; cuda needs no GPU.

    `strict`: operations that would run on the host are refused.  `fallback_ops`: operators that run on the host, such as
    "mylib::op".  `train`, `max_paths`, `context`, `lanes`, `chunk`, `dtype`, `weights`, `adapters`, `adapter_rank` and `progress`
    as for `build`.  A check spends most of its time importing torch.

    Raises a BuildError for wrong arguments, and if the model cannot be exported for a reason that is not a finding.
    """
    with ExitStack() as stack:
        tell = stack.enter_context(watcher(progress))
        if is_gguf(model):
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            model = _folder_of(model, Path(scratch), False, tell)
        options = Options(
            sizes=sizes, target=target, strict=strict, train=train, fallback_ops=tuple(fallback_ops), max_paths=max_paths,
            context=context, lanes=lanes, chunk=chunk, dtype=dtype, weights=weights, adapters=adapters, adapter_rank=adapter_rank,
            progress=tell,
        )  # fmt: skip
        check_check(model, inputs, options)
        stack.enter_context(with_torch(tell, f"{__package__}.check"))
        if is_folder(model):
            model, options = folder_model(model, options)
        from .check import check as run  # late: it imports torch

        return run(model, inputs, options)
