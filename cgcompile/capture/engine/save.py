"""`save_graphs`: the first process of an engine writes a recording beside the bundle's path, the second writes the bundle."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...errors import BuildError
from .observe import observed

if TYPE_CHECKING:
    import torch

    from cgbundle.format.schema import Engine, Manifest
    from cgbundle.validate.engine import Key

    from .assemble import AssembledEngine
    from .engine_take import EngineTake
    from .regions import Here

SUFFIX = ".recording"
"""Appended to the bundle's name for the first process's recording."""

DIFFER = ("engine-differs", "recordings-differ")
"""After these errors this process's recording replaces the first one.  The first process may have compiled kernels that later
processes load from a cache, so two later processes may agree."""

STATES_FILE = "graphs/modules.bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedGraphs:
    """What `save_graphs` wrote to `path`: `kind` is "recording" or "bundle".  For a bundle also the numbers of
    `nodes` in all graphs and of kernel `images`, and the bytes of its `arena`; 0 for a recording."""

    kind: Literal["recording", "bundle"]
    path: Path
    nodes: int = 0
    images: int = 0
    arena: int = 0


def save_graphs(
    graphs: Mapping[Key, torch.cuda.CUDAGraph],
    tensors: Mapping[str, torch.Tensor],
    out: str | os.PathLike[str],
    *,
    verify: bool = True,
    prepare: Callable[[Key], None] | None = None,
    returns: Mapping[Key, Collection[str]] | None = None,
) -> SavedGraphs:
    """Saves captured CUDA graphs for `cgbundle.attach`, which replays them in later processes over the tensors of that process.

    Call it in two processes of the engine, one after the other, with the same arguments.  Both call `cgcompile.observe()` before
    CUDA starts.  The first process writes a recording to `out` + ".recording".  The second compares the recording with its own
    graphs, where every address differs.  It writes the bundle to `out` and removes the recording.  If the kernels or the
    layouts of the two processes differ, the second replaces the recording with its own, and raises.

    - `graphs`: captured on the current device, by key.  A key is a whole number, a text, or a tuple of these.  torch must have kept
      the nodes: `torch.cuda.CUDAGraph(keep_graph=True)`.
    - `tensors`: dense tensors by name.  All tensors that the graphs read or write, and that no capture allocated, are required:
      weights, caches, inputs.  Add the outputs, which the captures allocated.  The bundle leaves out tensors that no graph uses.
    - `verify`: the second process replays every graph three times, once over poisoned outputs.  Then a fresh process without torch
      replays the bundle over the same memory at other addresses.  All replays must leave the same bits in the tensors.  The
      tensors' values are restored afterwards.  `attach` needs unverified=True for a bundle that was saved with verify=False.
    - `returns`: for every graph's key, the names of the outputs that it returns.  A replay is verified by these outputs and by
      the tensors that no capture allocated.  A returned output that the graph does not write is not compared: the engine writes
      it later.  Without `returns`, all outputs are compared after every replay.  Then verification fails if a graph's scratch
      memory, whose bits differ in every replay, is also the memory of another graph's outputs.
    - `prepare`: called with a graph's key before each replay of the verification, to write inputs into `tensors`.  Without it, a
      graph reads the values that the previous graphs wrote.  If a kernel increments a counter in a tensor, `prepare` must reset it.

    Synchronizes the device.  Refuses memory that belongs to none of `tensors`, and nodes that a bundle cannot hold.  The error
    names the kernel and, where it is known, the line of Python that launched it.  Raises a BuildError.
    """
    log = observed()
    _check_returns(returns, graphs, tensors)
    destination = Path(out)
    if os.path.lexists(destination):
        raise BuildError("output-exists", f"{destination}: exists already", "remove it first, or choose another path")
    if not destination.absolute().parent.is_dir():
        raise BuildError("output-unwritable", f"{destination}: its folder does not exist")
    from .engine_take import read_recording, write_recording
    from .read import read_engine

    recording = destination.with_name(f"{destination.name}{SUFFIX}")
    mine = read_engine(log, graphs, tensors)
    try:
        if not recording.exists():
            write_recording(recording, mine)
            return SavedGraphs(kind="recording", path=recording)
        first = read_recording(recording)
        try:
            saved = _complete(first, mine, graphs, tensors, destination, verify=verify, prepare=prepare, returns=returns)
        except BuildError as error:
            if error.code in DIFFER and first.process != mine.process:
                write_recording(recording, mine)  # a process that compiles may differ from those that load its compile cache
                text = f"{error}; the recording is now of this process, and the next one is compared with it"
                raise type(error)(error.code, text, error.hint) from error
            raise
        recording.unlink()
    except OSError as error:
        raise BuildError("output-unwritable", f"{error.filename or destination}: {error.strerror or error}") from error
    return saved


def _check_returns(returns: Mapping[Key, Collection[str]] | None, graphs: Collection[Key], tensors: Collection[str]) -> None:
    """Raises graph-refused for a graph that is missing in `returns`, or an unknown key or tensor."""
    for key in () if returns is None else [key for key in graphs if key not in returns]:
        raise BuildError("graph-refused", f"graph {key!r}: `returns` does not say what it returns", "name its outputs, or []")
    for key, names in (returns or {}).items():
        if key not in graphs:
            raise BuildError("graph-refused", f"`returns` names graph {key!r}, which is not among the graphs")
        for name in [name for name in names if name not in tensors]:
            raise BuildError("graph-refused", f"graph {key!r}: `returns` names tensor {name!r}, which is not among the tensors")


def _complete(
    first: EngineTake,
    mine: EngineTake,
    graphs: Mapping[Key, torch.cuda.CUDAGraph],
    tensors: Mapping[str, torch.Tensor],
    destination: Path,
    *,
    verify: bool,
    prepare: Callable[[Key], None] | None,
    returns: Mapping[Key, Collection[str]] | None,
) -> SavedGraphs:
    """Writes the bundle.  Raises what `assemble_engine` and `verify` do."""
    from ...bundle.emit import seal
    from ...bundle.publish import staged
    from .assemble import assemble_engine

    assembled = assemble_engine(first, mine, own_memory=not verify)
    try:
        with staged(destination, replace=False) as stage:
            manifest = seal(stage, _write(stage, first, mine, assembled, destination.stem))
            if verify:
                from .verify import verify as replay_afresh

                assert manifest.engine is not None
                here = _here(mine, manifest.engine, tensors)
                replay_afresh(stage, manifest.engine, assembled.arena, graphs, here, prepare or (lambda key: None), returns)
                seal(stage, replace(manifest, engine=replace(manifest.engine, verified=True)))
    except FileExistsError:
        text = f"{destination}: created during this call"
        raise BuildError("output-exists", text, "remove it first, or choose another path") from None
    except BlockingIOError:
        raise BuildError("output-busy", f"{destination}: another process is writing it") from None
    nodes = sum(len(recording.nodes) for recording in assembled.recordings)
    return SavedGraphs(kind="bundle", path=destination, nodes=nodes, images=len(mine.take.images), arena=assembled.arena)


def _write(stage: Path, first: EngineTake, mine: EngineTake, assembled: AssembledEngine, name: str) -> Manifest:
    """Writes all files except the manifest, and returns the manifest."""
    from cgbundle.format import file_names, safetensors_files
    from cgbundle.format.schema import KERNEL_CODE, VERSION, Manifest, Target

    from ...bundle import recordings as tables
    from ...bundle.provenance import provenance
    from ...targets.cuda.emit import write_kernels
    from ...targets.memory_layout import PAD
    from ...targets.weights import write_tables
    from .layout import inputs_bytes

    take = first.take
    write_kernels(stage, take.images)
    (stage / "graphs").mkdir()
    engine = _engine(first.keys, assembled)
    for row, recording in zip(engine.graphs, assembled.recordings, strict=True):
        (stage / row.file).write_bytes(tables.encode(recording))
    if assembled.states:
        (stage / STATES_FILE).write_bytes(tables.encode_states(assembled.states))
    with open(stage / file_names.WEIGHTS, "wb") as file:
        safetensors_files.write(file, {})
    weights = write_tables(stage / file_names.TABLES, assembled.tables)
    return Manifest(
        version=VERSION,
        name=name,
        target=Target(kind="cuda", arch=take.arch, driver=mine.take.driver),
        entries=(),
        weights=weights,
        memories=(
            *((("weights", assembled.weights_end + PAD),) if weights else ()),
            ("inputs", inputs_bytes([memory_range for memory_range in take.ranges if memory_range.kind == "inputs"])),
            ("arena", assembled.arena),
            (KERNEL_CODE, sum(map(len, take.images.values()))),
        ),
        regions=(),
        module_state=STATES_FILE if assembled.states else "",
        engine=engine,
        provenance=replace(provenance("graphs of an engine", {}), machine=dict(first.versions)["gpu"]),
        files=(),
    )


def _engine(keys: Sequence[Key], assembled: AssembledEngine) -> Engine:
    from cgbundle.format.schema import Engine, EngineGraph
    from cgbundle.validate.engine import encode_key

    rows = [EngineGraph(key=encode_key(key), file=f"graphs/{position}.bin") for position, key in enumerate(keys)]
    return Engine(graphs=tuple(rows), tensors=assembled.tensors, spans=assembled.spans)


def _here(mine: EngineTake, engine: Engine, tensors: Mapping[str, torch.Tensor]) -> Here:
    """Returns the addresses in this process of the bundle's spans, of its arena tensors and of the graphs' private pools."""
    from .regions import Here

    starts = {memory_range.offset: memory_range for memory_range in mine.take.ranges if memory_range.kind == "inputs"}
    spans = [starts[row.offset].start for row in engine.spans]
    pooled = {row.name: tensors[row.name].data_ptr() for row in engine.tensors if row.memory == "arena"}
    pools = [(piece.start, piece.size) for piece in mine.take.ranges if piece.kind == "pool"]
    return Here(spans=tuple(spans), pooled=pooled, pools=tuple(pools))
