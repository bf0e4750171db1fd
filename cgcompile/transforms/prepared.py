"""An entry of the model as the stages behind the export see it: each stage adds its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.export import ExportedProgram, ExportGraphSignature
from torch.fx import GraphModule, Node

from cgbundle.format.schema import Dimension, Finding, IntKey

from ..errors import ModelError
from ..export.exported import Exported, Signature
from ..export.functionalization import functional, state_buffers, written_inputs
from ..export.programs import Programs
from ..export.torch_program import copied_graph, with_graph
from ..model.devices.index_guard import FAILURES, guarded_indices
from ..model.devices.markers import marker
from ..model.flat_module import PREFIX, ProgramModule, Reference, run_eager
from ..model.source import CPU, ROWS, SELF_TEST_SEED, Source
from .eager_precision import eager_spread
from .output_aliases import OutputAlias, find_aliases
from .rng.rewrite import generator_buffer, with_generator

Placements = Mapping[IntKey, Mapping[str, str]]
"""By int_key, the nodes of its program that must run on the host in a bundle for a GPU, with the reasons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """An entry whose programs are ready to be lowered.  Buffers have their names in the programs.

    `written`: positions of the inputs that a program writes to.  `changes`: the buffers that this entry's programs write to.
    `state`: the buffers that any entry of the model writes to, and those that hold a number of rows.  `varying`: buffers of the
    state whose number of rows is chosen at load.  `weights`: the tensors of all entries.  `generator`: the buffer of the random
    number generator, or "".  `reference`: computes the expected results.  `self_test_calls`: how often the self-test calls each
    int_key.  `spread`: by output, the largest result of `eager_spread` at the smallest and the largest int_key.

    The check adds `findings` and `placements`: by int_key, the nodes of its program that must run on the host in a bundle for a
    GPU, with the reasons.  The proof of padding adds `dimensions`.
    """

    exported: Exported
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
    findings: tuple[Finding, ...] = ()
    placements: Placements = field(default_factory=dict)
    dimensions: tuple[Dimension, ...] = ()

    @property
    def name(self) -> str:
        return self.exported.source.entry

    @property
    def source(self) -> Source:
        return self.exported.source

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """The sizes of every declared dimension."""
        return self.exported.sizes

    @property
    def keys(self) -> tuple[IntKey, ...]:
        """The int_keys, in order."""
        return self.exported.keys

    @property
    def on_gpu(self) -> bool:
        """Whether eager PyTorch ran on a GPU."""
        return self.source.device != CPU


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
        exported=exported, programs=programs, signature=signature, written=written,
        changes=state, state=state, varying=varying, weights=programs.weights(), generator=generator, aliases=aliases,
        reference=reference,
        self_test_calls=_self_test_calls(exported, reference, state), spread=_spread(exported, reference),
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
        for name in sorted(entry.exported.baked.keys() & plain):
            text = f"{entry.exported.baked[name]}: data-dependent-branch: Python reads the value of {name!r}, which calls change"
            raise ModelError("data-dependent-branch", text)

    def alias(row: OutputAlias) -> OutputAlias:
        return replace(row, memory="state") if row.name in plain else row

    return tuple([replace(entry, state=state, weights=weights, aliases=tuple(map(alias, entry.aliases))) for entry in entries])


def _self_test_calls(exported: Exported, reference: Reference, state: Sequence[str]) -> int:
    """Returns 2 for a model with state, because only a second call shows whether the first one's state was kept.  Returns 1 without
    state, or if eager PyTorch fails at the second call, for example because one call fills a cache."""
    if not state:
        return 1
    for key in exported.keys:
        tensors = exported.inputs_at(key)
        try:
            # the second call may write beyond the end of a cache
            with guarded_indices(exported.source.device):
                run_eager(reference, tensors, calls=2)
        except FAILURES:
            return 1
    return 2


def _spread(exported: Exported, reference: Reference) -> tuple[float, ...]:
    """Returns the spread of `Prepared`.  Uses inputs of the self-test, because the effect of rounding differs between inputs."""
    draws = [exported.inputs_at(key, SELF_TEST_SEED) for key in dict.fromkeys([exported.keys[0], exported.keys[-1]])]
    return tuple(map(max, zip(*[eager_spread(reference, tensors) for tensors in draws], strict=True)))


def without_markers(program: ExportedProgram) -> ExportedProgram:
    """Returns `program` without the marker operators (model/devices/markers.py), which are identities, or `program` if it has
    none.  All other nodes keep their names and metadata.  Weights are shared, not copied.  The result can be saved and loaded
    without cgcompile."""
    if not any(marker(node) for module in _graphs(program.graph_module) for node in module.graph.nodes):
        return program
    root = copied_graph(program)
    renamed = _drop(root)
    for module in _graphs(root):
        if module is not root:
            _drop(module)
    return with_graph(program, root, renamed)


def _graphs(module: GraphModule) -> list[GraphModule]:
    return [submodule for submodule in module.modules() if isinstance(submodule, GraphModule)]


def _drop(module: GraphModule) -> dict[str, str]:
    """Removes the markers from `module`'s graph.  Returns marker name -> name of the node that replaces it."""
    renamed: dict[str, str] = {}
    for node in [node for node in module.graph.nodes if marker(node)]:
        source = node.args[0]
        assert isinstance(source, Node)
        renamed[node.name] = renamed.get(source.name, source.name)
        node.replace_all_uses_with(source)
        module.graph.erase_node(node)
    module.recompile()
    return renamed
