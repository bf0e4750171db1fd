"""The input of lowering: the transformed programs, the tensors that they write to, and the outputs that share memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.export import ExportGraphSignature

from cgbundle.format.schema import IntKey

from ..errors import ModelError
from ..export.exported import Exported, Signature
from ..export.functionalization import functional, state_buffers, written_inputs
from ..export.programs import Programs
from ..model.devices.index_guard import FAILURES, guarded_indices
from ..model.flat_module import PREFIX, ProgramModule, Reference, run_eager
from ..model.source import CPU, ROWS, SELF_TEST_SEED, all_keys, sample
from .eager_precision import eager_spread
from .marker_removal import without_markers
from .output_aliases import OutputAlias, find_aliases
from .rng.rewrite import generator_buffer, with_generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Programs that are ready to be lowered.  Buffers have their names in the programs.

    `written`: positions of the inputs that a program writes to.  `changes`: the buffers that this entry's programs write to.
    `state`: the buffers that any entry of the model writes to, and those that hold a number of rows.  `varying`: buffers of the
    state whose number of rows is chosen at load.  `weights`: the tensors of all entries.  `generator`: the buffer of the random
    number generator, or "".  `reference`: computes the expected results.  `self_test_calls`: how often the self-test calls each
    int_key.  `spread`: by output, the largest result of `eager_spread` at the smallest and the largest int_key.  `on_gpu`: eager
    PyTorch ran on a GPU.  `baked`: as in `Exported`.
    """

    programs: Programs
    signature: Signature
    written: tuple[int, ...]
    changes: tuple[str, ...]
    state: tuple[str, ...]
    varying: tuple[str, ...]
    weights: Mapping[str, torch.Tensor] = field(repr=False)
    generator: str
    aliases: tuple[OutputAlias, ...]
    reference: Reference
    self_test_calls: int
    spread: tuple[float, ...]
    on_gpu: bool
    baked: Mapping[str, str] = field(default_factory=dict)


def prepare(
    exported: Exported, signature: Signature, functionalized: Mapping[IntKey, ExportGraphSignature], markers: bool
) -> Prepared:
    """Applies the transforms: removes marker operators unless `markers`, and rewrites random operators.  Then finds the tensors
    that programs write to, and the outputs that share memory.

    `functionalized`: by key, the result of `functional` for its exported program.  Raises outputs-shared, state-refused,
    structure-unsupported.
    """
    bare = exported.programs if markers else exported.programs.changed(without_markers)
    programs = bare.changed(partial(with_generator, first=torch.zeros(2, dtype=torch.int64, device=exported.source.device)))
    if rows := exported.source.rows:
        from .state_rows import with_counted_rows  # imported late: few models need it

        programs = programs.changed(partial(with_counted_rows, rows=rows, run_device=exported.source.target_device))
    varying = tuple([PREFIX + name for row in rows for name in row.buffers])
    signatures = [functionalized[key] if program is bare.at(key) else functional(program) for key, program in programs.distinct]
    state = tuple(sorted({name for signature in signatures for name in state_buffers(signature)}))
    written = tuple(sorted({i for signature in signatures for i in written_inputs(signature)}))
    if not (signature.outputs or written or state):
        label, entry = exported.source.label, exported.source.entry
        raise ModelError("structure-unsupported", f"{label}: {entry}() returns no tensor, and writes to no buffer or input")
    generator = next((name for _, program in programs.distinct if (name := generator_buffer(program))), "")
    reference: Reference = ProgramModule([program for _, program in programs.distinct]) if generator else exported.flat
    aliases = find_aliases(exported, signature.outputs, state)
    if shared := next((alias.name for alias in aliases if PREFIX + alias.name in varying), ""):
        text = f"{exported.source.entry}() returns a part of state {shared!r}, whose number of rows is chosen at load"
        raise ModelError("state-refused", f"{exported.source.label}: {text}", "clone the output in forward()")
    return Prepared(
        programs=programs, signature=signature, written=written,
        changes=state, state=state, varying=varying, weights=programs.weights(), generator=generator, aliases=aliases,
        reference=reference,
        self_test_calls=_self_test_calls(exported, reference, state), spread=_spread(exported, reference),
        on_gpu=exported.source.device != CPU, baked=exported.baked,
    )  # fmt: skip


def together(entries: Sequence[Prepared]) -> tuple[Prepared, ...]:
    """Returns the entries of one model, each with the state and the weights of all.

    Raises data-dependent-branch if Python read a value of a buffer that calls change.  Raises state-refused if no call writes to a
    buffer of `varying`."""
    changes = {name for entry in entries for name in entry.changes}
    weights = {name: value for entry in entries for name, value in entry.weights.items()}
    state = tuple(sorted(changes | {name for name in weights if name.startswith(ROWS)}))
    for name in entries[0].varying:
        if name not in changes:
            raise ModelError("state-refused", f"state: no call writes to {name.removeprefix(PREFIX)!r}", "leave it out of state()")
    plain = {name.removeprefix(PREFIX) for name in state}
    for entry in entries:
        for name in sorted(entry.baked.keys() & plain):
            text = f"{entry.baked[name]}: data-dependent-branch: Python reads the value of {name!r}, which calls change"
            raise ModelError("data-dependent-branch", text)

    def alias(row: OutputAlias) -> OutputAlias:
        return replace(row, memory="state") if row.name in plain else row

    return tuple([replace(entry, state=state, weights=weights, aliases=tuple(map(alias, entry.aliases))) for entry in entries])


def _self_test_calls(exported: Exported, reference: Reference, state: Sequence[str]) -> int:
    """Returns 2 for a model with state, because only a second call shows whether the first one's state was kept.  Returns 1 without
    state, or if eager PyTorch fails at the second call, for example because one call fills a cache."""
    if not state:
        return 1
    for key in all_keys(exported.sizes):
        tensors = sample(exported.source, dict(zip(exported.sizes, key, strict=True))).tensors
        try:
            # the second call may write beyond the end of a cache
            with guarded_indices(exported.source.device):
                run_eager(reference, tensors, calls=2)
        except FAILURES:
            return 1
    return 2


def _spread(exported: Exported, reference: Reference) -> tuple[float, ...]:
    """Returns the spread of `Prepared`.  Uses inputs of the self-test, because the effect of rounding differs between inputs."""
    keys = all_keys(exported.sizes)
    draws = [
        sample(exported.source, dict(zip(exported.sizes, key, strict=True)), SELF_TEST_SEED).tensors
        for key in dict.fromkeys([keys[0], keys[-1]])
    ]
    return tuple(map(max, zip(*[eager_spread(reference, tensors) for tensors in draws], strict=True)))
