"""Checks the arguments of build and check before torch is imported, because that import takes seconds.

No user code runs: a model file is only parsed.  Errors that the source text does not show are raised later, with the same texts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from cgbundle.format.file_names import FORWARD
from cgbundle.validate.manifest import WORLDS

from ..errors import BuildError
from ..model.declared_sizes import SizesOption, count_keys, declared_sizes, sizes_of_entries
from ..targets.choice import Options, asks_torch, choose, is_cpu, recorder_for
from ..targets.requirements import check_compiler, check_packages
from ..util.explanations import explanations, nearest
from ..util.model_file import (
    Definitions,
    check_arguments,
    check_file,
    check_saved,
    definitions,
    kind_of,
    missing_attribute,
    missing_module,
    name_of,
    undefined,
)
from .destination import check_free, destination_path
from .folders import check_folder_options, check_weights

NO_PROOF = "--prove none skips the proof"


def check_build(model: Any, inputs: Any, options: Options) -> None:
    """Raises the errors of `build` for these arguments: extra-missing, source-missing, source-invalid, folder-invalid,
    allow-unknown, sizes-invalid, too-many-keys, limit-invalid, world-refused, output-exists, output-unwritable, option-invalid,
    target-unavailable, compiler-failed."""
    check_arguments(model, inputs)
    check_packages("host")
    _check_allowed(options.allow)
    check_folder_options(model, options)
    check_weights(options)
    name = _check_model(model, options.sizes, options.max_keys)
    if options.autotune_timeout is not None:
        check_timeout(options.autotune_timeout, options.autotune)
    # "auto" and "cuda" need torch, so `build` resolves them after it has imported torch
    targets = options.targets
    if len(targets) > 1:
        _check_targets(targets, options)
    resolvable = not any(map(asks_torch, targets))
    if options.split is not None and options.world is None:
        raise BuildError("world-refused", f"split={options.split!r} without world: over how many GPUs?", "add --world 2, or more")
    record = options.record if options.world is None else _check_world(model, options)
    recorder = ""
    for target in targets if resolvable else ():
        standalone = bool(options.standalone) and (len(targets) == 1 or is_cpu(target))
        recorder = choose(replace(options, target=target, record=record, standalone=standalone)).recorder
    if name:
        check_free(destination_path(options.out, name), options.force)
    if not options.prove_budget > 0:
        raise BuildError("limit-invalid", f"prove_budget is {options.prove_budget}, expected more than 0 seconds", NO_PROOF)
    if recorder:
        check_packages(recorder)
    if recorder == "host":
        check_compiler()


def _check_world(model: Any, options: Options) -> str:
    """Returns the recorder of a model on several devices.  Raises world-refused for models and options that cannot be built so."""
    if options.split not in (None, "layers"):
        raise BuildError("option-invalid", f"split {options.split!r}: expected layers")
    if options.world not in WORLDS:
        raise BuildError("world-refused", f"world is {options.world}: expected {WORLDS[0]} to {WORLDS[-1]} GPUs")
    if not isinstance(model, str | os.PathLike) or kind_of(os.fspath(model)) == "saved":
        cause = "each rank is built in its own process, which calls model(): a module in memory and a .pt2 have no such function"
        hint = "give a model.py or package.module:attribute with model(rank, world)"
        raise BuildError("world-refused", f"world={options.world}: {cause}", hint)
    if is_cpu(options.target):
        raise BuildError("world-refused", f"world={options.world}: the target {options.target} has one device")
    if options.record == "capture":
        raise BuildError("world-refused", f"world={options.world}: NCCL's kernels cannot be captured, the bundle is cross-compiled")
    if options.donations:
        raise BuildError("world-refused", f"world={options.world}: donations need one device")
    return "cross-compile"


def check_timeout(timeout: float, autotune: bool) -> None:
    """Raises limit-invalid for a timeout without autotune, and for a timeout that is not positive."""
    if not autotune:
        text = f"autotune_timeout is {timeout:g} seconds, and nothing is autotuned"
        raise BuildError("limit-invalid", text, "add --autotune, or leave --autotune-timeout out")
    if not timeout > 0:
        text = f"autotune_timeout is {timeout:g}, expected more than 0 seconds"
        raise BuildError("limit-invalid", text, "leave --autotune-timeout out for no limit")


def _check_allowed(allow: Sequence[str]) -> None:
    """Raises allow-unknown for a name that is not a rule."""
    rules = [explanation.name for explanation in explanations() if explanation.kind == "finding"] if allow else []
    for name in allow:
        if name not in rules:
            best = " or ".join(nearest(name, rules))
            raise BuildError("allow-unknown", f"allow {name!r}: no such rule{f' (did you mean {best}?)' if best else ''}")


def _check_targets(targets: Sequence[str], options: Options) -> None:
    """Raises target-unavailable, world-refused or option-invalid for an impossible build with variants."""
    duplicate = next((name for name in targets if targets.count(name) > 1), None)
    unresolved = next((name for name in targets if name in ("auto", "cuda", "")), None)
    if duplicate is not None or unresolved is not None:
        cause = f"{duplicate} is named twice" if duplicate else f"{unresolved or 'an empty name'} does not name one target"
        raise BuildError("target-unavailable", f"target {options.target}: {cause}", "name each one: --target sm_80,sm_90,x86-64-v3")
    if options.world is not None:
        raise BuildError("world-refused", f"world={options.world}: a model over several devices has no variants")
    if options.record == "capture":
        raise BuildError("option-invalid", "record 'capture': the GPUs of several targets are cross-compiled", "leave --record out")
    if options.autotune:
        raise BuildError("option-invalid", "--autotune times one GPU, and several targets are named", "build one target")


def check_check(model: Any, inputs: Any, options: Options) -> None:
    """Raises the errors of `check` for these arguments.  See `check_build`."""
    check_arguments(model, inputs)
    check_packages("host")
    check_folder_options(model, options)
    check_weights(options)
    _check_model(model, options.sizes, None)
    if not asks_torch(options.target):
        recorder_for(options.target)


def _check_model(model: Any, sizes: SizesOption, max_keys: int | None) -> str:
    """Returns the bundle's default name, or "" for a module in memory.  If `max_keys` is None, sizes may be missing."""
    if not isinstance(model, str | os.PathLike):
        return ""
    label = os.fspath(model)
    kind, path, attribute = kind_of(label), label, ""
    if kind == "saved":
        check_saved(label)
        return name_of(label)
    if kind == "folder":
        return name_of(label)
    if kind == "file":
        module_definitions: Definitions | None = definitions(check_file(label), label)
    else:
        path, _, attribute = label.partition(":")
        module_definitions = _module(path, label)
    # `entries()` names the functions that make inputs, but only when it runs
    several = module_definitions is not None and "entries" in module_definitions.names
    for name in (() if attribute else ("model",)) + (() if several else ("inputs",)):
        if module_definitions is not None and module_definitions.lacks(name):
            raise undefined(name, label)
    if module_definitions is not None and attribute and module_definitions.lacks(attribute.partition(".")[0]):
        raise missing_attribute(path, attribute, label)
    dimensions = module_definitions.parameters("inputs") if module_definitions is not None and not several else None
    if dimensions is not None and (sizes or max_keys is not None):
        declared = declared_sizes(sizes_of_entries(sizes, {FORWARD: dimensions})[FORWARD], dimensions)
        if max_keys is not None:
            count_keys({"": declared}, max_keys)
    return name_of(label)


def _module(path: str, label: str) -> Definitions | None:
    """Returns the definitions of the module `path`, or None if only an import could find them.  Raises source-missing."""
    if path in sys.modules or not all(part.isidentifier() for part in path.split(".")):
        return None
    outer, *inner = path.split(".")
    search_path: Sequence[str] | None = None
    for depth, part in enumerate((outer, *inner)):
        name = ".".join([outer, *inner][: depth + 1])
        spec = _module_spec(name, search_path)
        if spec is None and not depth:
            raise missing_module(part, label)
        if spec is None or (depth < len(inner) and spec.submodule_search_locations is None):
            return None  # a package may set its __path__ when it is imported
        search_path = spec.submodule_search_locations
    file = spec.origin if spec is not None else None
    return definitions(Path(file), label) if file and file.endswith(".py") else None


def _module_spec(name: str, search_path: Sequence[str] | None) -> Any:
    """Finds the specification of a module with the importers of sys.meta_path, then in the current folder."""
    for finder in sys.meta_path:
        if (spec := finder.find_spec(name, search_path)) is not None:
            return spec
    return PathFinder.find_spec(name, [os.getcwd()]) if search_path is None else None
