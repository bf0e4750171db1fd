"""Judges one case for one target: builds it, loads it, and compares calls with new inputs with eager PyTorch."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import cgbundle
import cgcompile
from cgbundle.errors import CgbundleError
from cgbundle.format.schema import Manifest
from cgcompile.model.devices.placing import placed
from cgcompile.model.load import load_source
from cgcompile.model.source import CPU
from cgcompile.model.tracing.held_tensors import current_buffers, held_buffers
from cgcompile.util.tolerance import compare, is_float, tolerance

from .case import Case, as_for
from .results import BUILT, FAILED, REFUSED, RIGHT, WRONG, Row

SEED = 2026
"""Seed of the inputs that are compared; a build uses seed 0."""

CHECK = "check"
TARGETS = (CHECK, "cpu", "sm_90", "cuda")
"""`check` exports the model and looks for findings, but builds nothing."""

FINDINGS = frozenset({
    "check-refused", "data-dependent-branch", "state-changed", "structure-unsupported", "data-dependent-output",
    "operator-without-kernel", "size-excluded", "eager-failed", "data-dependent-shape", "dtype-unsupported", "outputs-shared",
    "operator-without-code", "export-differs", "state-shared", "input-changed", "random-operation", "numpy-untraceable",
})  # fmt: skip
"""Error codes for models that cannot be in a bundle. Every other error is a defect of the compiler."""

PLACE = re.compile(r"[^\s:'\"()]+\.py:\d+")


def judge(case: Case, target: str, bundle: Path, prove: str) -> Row:
    """Builds `case` at `bundle`, and compares the bundle if this machine can run it. Errors that are not CgbundleError are
    raised."""
    begun = time.perf_counter()
    module, inputs = case.build()
    stages = {"make": time.perf_counter() - begun}
    if target == CHECK:
        return checked(case, module, inputs)
    options = {"record": "cross-compile", "prove": prove} if target.startswith("sm_") else {}
    try:
        built = cgcompile.build(module, inputs, sizes=dict(case.sizes), out=bundle, target=target, **options)
    except CgbundleError as error:
        return refusal(case, target, error)
    stages |= dict(built.seconds)
    if target.startswith("sm_"):
        proofs = [proof for proof in built.manifest.entries[0].self_test.proofs if proof.method != "none"]
        worst = max((proof.error for proof in proofs), default=0.0)
        return Row(name=case.name, target=target, verdict=BUILT, error=worst, stages=stages)
    return replayed(case, target, bundle, stages)


def checked(case: Case, module: torch.nn.Module, inputs: Any) -> Row:
    """Returns the verdict of `cgcompile.check` for a GPU, which exports and partitions but compiles nothing."""
    begun = time.perf_counter()
    try:
        report = cgcompile.check(module, inputs, sizes=dict(case.sizes), target="cuda")
    except CgbundleError as error:
        return refusal(case, CHECK, error)
    stages = {"check": time.perf_counter() - begun}
    refusing = [finding for finding in report.findings if finding.severity == "refuse"]
    if not refusing:
        regions = " ".join(f"{region.kind}" for region in report.regions)
        return Row(name=case.name, target=CHECK, verdict=BUILT, message=report.unpartitioned or regions, stages=stages)
    first = refusing[0]
    return Row(
        name=case.name, target=CHECK, verdict=REFUSED if first.where else FAILED, message=f"{first.where}: {first.message}",
        code=first.rule, place=first.where, stages=stages,
    )  # fmt: skip


def refusal(case: Case, target: str, error: CgbundleError) -> Row:
    """Returns the verdict on a CgbundleError: a finding that names a line of the model, a wrong result, or a defect."""
    text = str(error)
    model_line = next((place for place in PLACE.findall(text) if "-packages/torch/" not in place), "")
    verdict = REFUSED if error.code in FINDINGS and error.exit_code == 1 and model_line else FAILED
    if error.code == "proof-failed" and "differ" in text:
        verdict = WRONG
    return Row(name=case.name, target=target, verdict=verdict, message=text, code=error.code, place=model_line)


def replayed(case: Case, target: str, bundle: Path, stages: Mapping[str, float]) -> Row:
    """Loads a bundle and calls it at every recorded size and between them. Adds its times to `stages`."""
    # eager PyTorch's convolutions use TF32: the bounds of captured bundles allow for it, those of cross-compiled bundles do not
    torch.backends.cudnn.allow_tf32 = target == "cuda"
    all_stages = dict(stages)
    begun = time.perf_counter()
    with cgbundle.load(str(bundle)) as program:
        all_stages["load"] = time.perf_counter() - begun
        begun = time.perf_counter()
        worst, complaint, between = _calls(case, program, target)
        all_stages["compare"] = time.perf_counter() - begun
    verdict = WRONG if complaint else RIGHT
    return Row(name=case.name, target=target, verdict=verdict, message=complaint, between=between, error=worst, stages=all_stages)


def _calls(case: Case, program: cgbundle.Program, target: str) -> tuple[float, str, str]:
    """Returns (the largest error relative to its bound, the first wrong result, the outcome at the size between recorded ones)."""
    device = "cpu" if target == "cpu" else "cuda"
    with as_for(target):
        built = case.build()
    with _on_device(*built, torch.device(device, 0) if device == "cuda" else CPU) as (module, inputs):
        worst = 0.0
        for key in program.int_keys:
            sizes = dict(zip(case.sizes, key, strict=True))
            error, complaint = _call(case, module, inputs, program, target, sizes)
            worst = max(worst, error)
            if complaint:
                return worst, f"{sizes}: {complaint}", ""
        sizes = case.between()
        if not sizes:
            return worst, "", "none"
        if any(dimension.pad == "no" for dimension in program.manifest.entries[0].dimensions):
            return worst, "", "not proved"
        error, complaint = _call(case, module, inputs, program, target, sizes)
        return max(worst, error), complaint and f"{sizes}: {complaint}", "wrong" if complaint else "right"


@contextmanager
def _on_device(module: torch.nn.Module, inputs: Any, device: torch.device) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Moves the model to `device` as a build does. This includes tensors and devices in objects among its attributes (the layers of
    a cache), which `module.to()` does not move."""
    with placed(load_source(module, inputs), device) as source, current_buffers(source.model, held_buffers(source.model), device):
        yield source.model, inputs


def _call(
    case: Case, module: torch.nn.Module, inputs: Any, program: cgbundle.Program, target: str, sizes: Mapping[str, int]
) -> tuple[float, str]:
    device = "cpu" if target == "cpu" else "cuda"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        arguments = inputs(**sizes)
    args, kwargs = _arguments(_moved(arguments, device))
    own_args, own_kwargs = copy.deepcopy((args, kwargs))
    if len(program.state):
        program.reset()
    with torch.no_grad():
        try:
            expected = list(_leaves(_copied(module)(*own_args, **own_kwargs)))
        except RuntimeError:  # a model may create tensors on the CPU whatever its device is: eager PyTorch can only run it there
            if device == "cpu":
                raise
            with as_for(target):
                expected = list(_leaves(case.build()[0](*_moved(own_args, "cpu"), **_moved(own_kwargs, "cpu"))))
    got = dict(_leaves(program(*args, **kwargs)))
    return _compared(program.manifest, expected, got)


def _copied(module: torch.nn.Module) -> torch.nn.Module:
    """Returns a copy, so that no call changes the next one. Returns the module itself if torch cannot copy it (`weight_norm`), or
    Python cannot (torchphysics' spaces)."""
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError):
        return module


def _compared(
    manifest: Manifest, expected: Sequence[tuple[str, torch.Tensor]], got: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """Returns the largest error relative to its bound, and the first tensor beyond its bound. Bounds are those of the manifest, in
    the order of the outputs."""
    bounds = manifest.entries[0].self_test.bounds if len(expected) == len(manifest.entries[0].outputs) else ()
    worst = 0.0
    for index, (path, want) in enumerate(expected):
        have = got.get(path)
        if have is None:
            return worst, f"output {path} is missing; there are {', '.join(got) or 'none'}"
        bound = bounds[index] if bounds else tolerance(want.dtype)
        outcome = compare(want.to(have.device), have)
        if outcome.error > bound:
            return outcome.error / (bound or 1.0), f"output {path}: by {outcome.error:.1e}, allowed {bound:.1e}: {outcome.text}"
        worst = max(worst, outcome.error / bound if is_float(want.dtype) and bound else 0.0)
    return worst, ""


def _arguments(arguments: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) from the result of `inputs()`: (args, kwargs), a tuple, a dict by name, or a tensor."""
    if isinstance(arguments, tuple) and len(arguments) == 2 and isinstance(arguments[0], tuple) and isinstance(arguments[1], dict):
        return arguments
    if isinstance(arguments, Mapping):
        return (), dict(arguments)
    return (tuple(arguments) if isinstance(arguments, tuple | list) else (arguments,)), {}


def _moved(value: Any, device: str) -> Any:
    """Moves the tensors of a nested structure to a device."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a result with their paths: keys, indices and fields."""
    if isinstance(value, torch.Tensor):
        yield path or "output", value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(len(value)))
        for name, item in zip(names, value, strict=True):
            yield from _leaves(item, f"{path}.{name}" if path else str(name))
    elif hasattr(value, "layers"):  # a cache of transformers
        for index, layer in enumerate(value.layers):
            for name in ("keys", "values"):
                if isinstance(getattr(layer, name, None), torch.Tensor):
                    yield f"{path}.layers.{index}.{name}", getattr(layer, name)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _leaves({name: item for name, item in vars(value).items() if not name.startswith("_")}, path)
