"""Cuts out one device's share of every entry of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...bundle.ranks import Ranks
from ...errors import BuildError
from ...export.functionalization import functional_form
from ...export.programs import Programs
from ...transforms.prepared import Prepared, together
from .assign import Assignment, assign_devices
from .share import share_of


def layer_shares(entries: Sequence[Prepared], ranks: Ranks) -> tuple[Prepared, ...]:
    """This device's share of every entry.  Every process has the whole model.  A share has all inputs and outputs, the weights that
    its layers read, and the buffers that they change.  Raises split-refused."""
    for prepared in entries:
        if prepared.written or prepared.generator:
            written = "writes to an input, of which every device has its own copy"
            what = written if prepared.written else "draws random numbers, which would differ between the devices"
            raise BuildError("split-refused", f"model: a call {what}")
    functional = [prepared.programs.changed(functional_form) for prepared in entries]
    flat = [program for programs in functional for _, program in programs.distinct]
    owners, assignments = assign_devices(flat, entries[0].state, ranks.size)
    by_program = {id(program): assignment for program, assignment in zip(flat, assignments, strict=True)}
    shares = [_share(prepared, programs, by_program, owners, ranks) for prepared, programs in zip(entries, functional, strict=True)]
    return together(shares)


def _share(
    prepared: Prepared, programs: Programs, by_program: dict[int, Assignment], owners: dict[str, int], ranks: Ranks
) -> Prepared:
    """A device's share of one entry.  `by_program`: the assignments by the `id` of the program."""
    shares = programs.changed(lambda program: share_of(program, by_program[id(program)], ranks.rank, ranks.size))
    ranks_of = by_program[id(programs.first)].ranks
    free = [name not in ranks_of for name in programs.first.graph_signature.user_outputs]
    aliases = [row for row in prepared.aliases if free[row.output] and (row.memory != "outputs" or free[row.index])]
    changes = tuple([name for name in prepared.changes if owners[name] == ranks.rank])
    return replace(prepared, programs=shares, changes=changes, weights=shares.weights(), aliases=tuple(aliases))
