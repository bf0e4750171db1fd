"""What is lowered: the exported program after the transforms, and what a call of it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.export import ExportedProgram, ExportGraphSignature

from ..export.exported import Exported, Signature
from ..export.functionalization import functional, state_buffers, written_inputs
from ..model.flat_module import ProgramModule, Reference, run_eager
from ..model.source import all_keys, sample
from .marker_removal import without_markers
from .output_aliases import OutputAlias, find_aliases
from .rng.rewrite import generator_buffer, with_generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A program, ready to be lowered.

    `written`: positions of the inputs that it writes to.  `state`: the buffers that it writes to, by their names in the program.
    `generator`: the buffer of its random numbers, named so too, "" without.  `reference` gives what a call has to give, and
    `exam_calls` is how often the exam calls each int_key.
    """

    program: ExportedProgram
    signature: Signature
    written: tuple[int, ...]
    state: tuple[str, ...]
    generator: str
    aliases: tuple[OutputAlias, ...]
    reference: Reference
    exam_calls: int


def prepare(exported: Exported, signature: Signature, functionalized: ExportGraphSignature, markers: bool) -> Prepared:
    """The transforms: markers out unless `markers`, random numbers computed; then what a call writes, shares and draws.

    `functionalized`: what `functional` gives for the exported program.  Raises outputs-shared.
    """
    bare = exported.program if markers else without_markers(exported.program)
    program = with_generator(bare)
    if program is not bare:
        functionalized = functional(program)
    state, generator = state_buffers(functionalized), generator_buffer(program)
    reference: Reference = ProgramModule(program) if generator else exported.flat
    aliases = find_aliases(exported, signature.outputs, state)
    return Prepared(
        program=program, signature=signature, written=written_inputs(functionalized), state=state, generator=generator,
        aliases=aliases, reference=reference, exam_calls=_exam_calls(exported, reference, state),
    )  # fmt: skip


def _exam_calls(exported: Exported, reference: Reference, state: Sequence[str]) -> int:
    """Twice for a model with state: only the second call shows whether it begins where the first one ended.  Once where eager
    PyTorch fails at that, as with a cache that one call fills."""
    if not state:
        return 1
    for key in all_keys(exported.sizes):
        tensors = sample(exported.source, dict(zip(exported.sizes, key, strict=True))).tensors
        try:
            run_eager(reference, tensors, calls=2)
        except (RuntimeError, IndexError, ValueError):
            return 1
    return 2
