"""Lower every int_key in a process of its own, some at a time.  The parent's side; imports no Inductor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cgcompile.record.tensors import contents, program_tensors, settings
from cgcompile.trace.children import ask
from cgcompile.trace.errors import LoweringBroken
from cgcompile.trace.keeping import digest, recall, remember, sources, versions
from cgcompile.trace.traced import Key, Traced


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A process's work.

    `program`: the exported program; `tensors`: the call's tensors of every key; `settings`: torch's switches that choose kernels;
    `table`: the folder of measured configurations, or None for Inductor's offers ranked by the model of cost.
    """

    program: Path
    tensors: Path
    key: Key
    arch: str
    settings: Mapping[str, Any]
    table: Path | None


def lower_all(
    program: torch.export.ExportedProgram,
    calls: Mapping[Key, Sequence[torch.Tensor]],
    arch: str,
    folder: Path,
    *,
    cache: Path,
    table: Path | None = None,
    workers: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[Key, Traced]:
    """Every key of `calls` (its tensors, on the CPU) lowered for `arch`, in the order of `calls`.

    `folder` takes working files and logs; `cache` keeps what was lowered, by content.  `workers`: processes at a time, by default
    one for each processor.  Raises what `lowering.lower_key` raises, and LoweringBroken when a process ends without an answer.
    """
    about = digest(*_described(program), arch, table.read_bytes() if table else b"", settings(), versions(), sources())
    kept = {key: cache / "lowered" / digest(about, key, [_meta(tensor) for tensor in calls[key]]) for key in calls}
    known: dict[Key, Traced | None] = {key: recall(path) for key, path in kept.items()}
    if all(known.values()):
        tell(f"all {len(known)} int_keys were lowered before")
    else:
        torch.export.save(program, folder / "program.pt2")
        torch.save({key: tuple(tensors) for key, tensors in calls.items()}, folder / "calls.pt")

    def one(number: int, key: Key) -> Traced:
        before = known[key]
        if before is not None:
            return before
        name = f"lower{number}-{'x'.join(map(str, key)) or 'fixed'}"
        request = Request(
            program=folder / "program.pt2",
            tensors=folder / "calls.pt",
            key=key,
            arch=arch,
            settings=settings(),
            table=table,
        )
        found: Traced = ask("cgcompile.trace.lower_child", request, folder / name, {}, LoweringBroken, f"lowering int_key {key}")
        remember(kept[key], found)
        tell(f"lowered {key}: {len(found.variants)} kernels")
        return found

    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        futures = {key: pool.submit(one, number, key) for number, key in enumerate(calls)}
        try:
            return {key: future.result() for key, future in futures.items()}
        finally:
            pool.shutdown(cancel_futures=True)


def _described(program: torch.export.ExportedProgram) -> Iterator[object]:
    """All of a program that lowering depends on: its code, signature, and tensors.  The ranges that the sizes were declared with do
    not matter to any one of them."""
    for name, module in program.graph_module.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            yield name, module.code
    yield str(program.graph_signature), str(program.call_spec)
    for name, value in program_tensors(program).items():
        yield name, _meta(value), hashlib.sha256(contents(value, value.stride())).digest()


def _meta(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()
