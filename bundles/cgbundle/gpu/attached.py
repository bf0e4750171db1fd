"""`attach`: replays an engine's captured graphs, saved by `cgcompile.save_graphs`, over the tensors of this process. In recordings
the engine's tensors are offsets in memory inputs. A copy of each table gets the addresses of the caller's tensors, and graphs are
built as for any bundle. Temporaries are in one arena. The caller's library (torch) uses the same context."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from ..cuda.driver import Context, Relaxed, call, driver_version
from ..cuda.graph_executor import GraphExecutor
from ..cuda.memory import Memories
from ..errors import BundleError, CallError, EntryMissing, MachineError, ProgramClosed, did_you_mean
from ..format.archive import Archive
from ..format.file_names import kernel_images
from ..format.schema import MEMORIES, Engine, EngineTensor, Manifest
from ..format.shapes import dense, moving, span_of
from ..process import PAUSE, QUIET, Background
from ..tensors.library import library_of
from ..validate.contents import check_loaded
from ..validate.engine import Key, check_engine_states, checked_table, decode_key, span_of_tensor
from .device_bundle import DeviceBundle, check_driver
from .moves import Move, moved

if TYPE_CHECKING:
    from ..signatures import Keys

INPUTS, ABSOLUTE = MEMORIES.index("inputs"), MEMORIES.index("host")
"""The memory of the engine's tensors, and a memory with address 0, in which offsets are addresses."""

LEGACY_STREAM = 1  # CU_STREAM_LEGACY, for libraries without a current stream


class AttachedGraph:
    """One graph, over the tensors that were given to `attach`."""

    __slots__ = ("_context", "_executor", "_graphs", "_position", "key")

    def __init__(self, graphs: AttachedGraphs, key: Key, position: int, context: Context) -> None:
        self._graphs, self.key, self._position, self._context = graphs, key, position, context
        self._executor: GraphExecutor | None = None

    def replay(self, stream: int | None = None) -> None:
        """Launches the graph in the order of a stream, and returns before it is done.

        `stream`: the driver's handle, as `torch.cuda.Stream.cuda_stream` has it.  None: the current stream of the tensors' library
        in this thread.  Two graphs of one bundle share memory: launch them on one stream, or wait between them.  Raises
        program-closed, driver-failed; if the graph is not built yet, also table-invalid, OutOfMemory.
        """
        graphs = self._graphs
        if graphs.closed:
            raise ProgramClosed("program-closed", f"graph {self.key!r}: these graphs were closed", "attach them again")
        graphs._replays += 1
        handle = graphs.stream() if stream is None else stream
        executor = self._executor or graphs._built(self)
        with self._context:
            executor.launch(handle)


class AttachedGraphs(Mapping[Key, AttachedGraph]):
    """The graphs of a bundle by the keys of `save_graphs`, in the same order.

    `tensors`: by name, the tensors that the captures allocated and `save_graphs` named, such as outputs.  They are tensors of the
    caller's library over this object's memory, valid until `close`.  `memory`: bytes of GPU memory in use, by kind.
    """

    def __init__(
        self, shared: DeviceBundle, cleanup: ExitStack, executor: Callable[[int], GraphExecutor], engine: Engine, placed: _Tensors
    ) -> None:
        """`cleanup` frees everything except `shared`; `executor` builds the graph at a position; `placed`: the caller's tensors,
        kept alive."""
        self._shared, self._cleanup, self._executor, self._placed = shared, cleanup, executor, placed
        self._graphs: dict[Key, AttachedGraph] = {}
        for position, graph in enumerate(engine.graphs):
            key = decode_key(graph.key, graph.file)
            self._graphs[key] = AttachedGraph(self, key, position, shared.context)
        self._background: Background | None = None
        self.tensors: Mapping[str, Any] = MappingProxyType({})
        self.memory: Mapping[str, int] = MappingProxyType({})
        self._replays, self.closed = 0, False

    def __getitem__(self, key: Key) -> AttachedGraph:
        """The graph that was saved under `key`.  Raises graph-missing, which is a KeyError."""
        graph = self._graphs.get(key)
        if graph is None:
            known = ", ".join(map(repr, self._graphs))
            near = did_you_mean(key, [name for name in self._graphs if isinstance(name, str)]) if isinstance(key, str) else ""
            raise EntryMissing("graph-missing", f"no graph was saved under {key!r}{near}, but under {known}")
        return graph

    def __iter__(self) -> Iterator[Key]:
        """The keys."""
        return iter(self._graphs)

    def __len__(self) -> int:
        """The number of graphs."""
        return len(self._graphs)

    def stream(self) -> int:
        """The current stream of the caller's library, as the driver's handle."""
        handle = self._placed.library.stream(self._shared.context.index)
        return LEGACY_STREAM if handle is None else handle

    def close(self) -> None:
        """Waits for the GPU, and frees what `attach` allocated; may be called twice.  The caller's own tensors stay."""
        with self._shared.lock:  # a graph that is being built is finished first
            if self.closed:
                return
            self.closed = True
        if self._background is not None:
            self._background.stop()
        try:
            with self._shared.context:
                call("cuCtxSynchronize")
            _free(self._shared.context, self._cleanup)
        finally:
            self._graphs, self.tensors = {}, MappingProxyType({})
            self._shared.release()

    def __enter__(self) -> AttachedGraphs:
        """These graphs, closed when the block ends."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        """Closes them."""
        self.close()

    def _built(self, graph: AttachedGraph) -> GraphExecutor:
        with self._shared.lock:
            if self.closed:
                raise ProgramClosed("program-closed", f"graph {graph.key!r}: these graphs were closed", "attach them again")
            if graph._executor is None:
                with self._shared.context, Relaxed():
                    executor = self._executor(graph._position)
                    self._cleanup.callback(executor.close)
                    call("cuStreamSynchronize", self._shared.context.stream)  # waits for its upload
                graph._executor = executor
            return graph._executor

    def _rest(self) -> Iterator[float]:
        """Builds a graph in each step, but none until QUIET seconds have passed without a replay."""
        seen = 0
        for graph in list(self._graphs.values()):
            if graph._executor is not None:
                continue
            yield PAUSE
            while seen != self._replays:
                seen = self._replays
                yield QUIET
            if self.closed:
                return
            self._built(graph)


def attach(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    device: int | None = None,
    unverified: bool = False,
    key: Keys | None = None,
    lazy: bool | None = None,
) -> AttachedGraphs:
    """Loads the graphs that `cgcompile.save_graphs` saved at `path`, to replay them over `tensors`.  torch may use CUDA already.

    `tensors` maps the names of `save_graphs` to tensors on one GPU.  Their dtype, shape, strides and alignment must be those of the
    saved ones, and tensors that overlap must do so at the same distance.  Names that no graph uses are ignored.
    `AttachedGraphs.tensors` has the outputs.  The graphs read and write the tensors in place, so keep them.

    - `device`: the GPU; None: that of the tensors.
    - `unverified`: True also accepts graphs that were saved with verify=False.
    - `key`: public ed25519 keys, one of which must have signed the bundle, as for `load`.  The signature is checked first.
    - `lazy`: False builds every graph now, True at its first replay.  None builds them in the background while no graph
      is replayed; a replay whose graph is not built yet builds it.

    All files and tensors are checked before anything is put on the GPU.  A graph's recording is checked when the graph is built.

    Raises bundle-missing, not-a-bundle, format-unsupported, signature-missing, signature-wrong, key-invalid, manifest-invalid,
    file-damaged, table-invalid, bundle-kind, not-verified, driver-differs, driver-too-old, wrong-machine, wrong-architecture,
    tensors-unlike, driver-failed, OutOfMemory.
    """
    return attach_poisoned(path, tensors, device=device, unverified=unverified, key=key, lazy=lazy)


def attach_poisoned(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    device: int | None = None,
    unverified: bool = False,
    key: Keys | None = None,
    lazy: bool | None = False,
    poison: int | None = None,
) -> AttachedGraphs:
    """`attach` for verification: `poison` fills the arena and undefined bytes of kernel parameters."""
    bundle = Archive(os.fspath(path))
    try:
        if key is not None:
            from .. import signatures  # most bundles are not signed

            signatures.check(bundle, key)  # before the manifest is parsed
        check_loaded(bundle, full=key is not None, tables=False)
        engine = _engine(bundle, unverified)
        _check_driver(bundle.manifest)
        check_engine_states(bundle)
        placed = _Tensors(engine, tensors, device)
        attached = _attached(bundle, engine, placed, lazy, poison)
        try:
            bundle.check_unchanged()
        except BundleError:
            attached.close()
            raise
        return attached
    finally:
        bundle.close()


def _engine(bundle: Archive, unverified: bool) -> Engine:
    engine = bundle.manifest.engine
    if engine is None:
        raise CallError("bundle-kind", f"{bundle.path}: holds a program, no graphs of an engine", "cgbundle.load(PATH) loads it")
    if not engine.verified and not unverified:
        raise CallError("not-verified", f"{bundle.path}: its graphs were saved without a replay in a fresh process")
    return engine


def _check_driver(manifest: Manifest) -> None:
    """Engine kernels were verified with one driver version, and run with no other."""
    check_driver(manifest.target)
    version, saved = driver_version(), manifest.target.driver
    if version != saved:
        text = f"the graphs were saved with a driver for CUDA {_version(saved)}, this machine's is for {_version(version)}"
        raise MachineError("driver-differs", text)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


class _Tensors:
    """The caller's checked tensors `by_name`, their `library`, `device`, and the addresses (`bases`) of the engine's spans. Raises
    tensors-unlike."""

    def __init__(self, engine: Engine, tensors: Mapping[str, Any], device: int | None) -> None:
        rows = [row for row in engine.tensors if row.memory == "inputs"]
        missing = [row.name for row in rows if row.name not in tensors]
        if missing:
            more = f", and {len(missing) - 1} more" if missing[1:] else ""
            raise _unlike(f"tensor {missing[0]!r} is missing{more}")
        self.by_name = {row.name: tensors[row.name] for row in rows}
        self.library = library_of(next(iter((*self.by_name.values(), *tensors.values())), None))
        self.device = device
        places: list[int | None] = [None] * len(engine.spans)
        for row in rows:
            address = self._address(row)
            position = span_of_tensor(engine, row)
            assert position is not None  # `check_engine` has checked this
            base = address - (row.offset - engine.spans[position].offset)
            if places[position] not in (None, base):
                raise _unlike(f"tensor {row.name!r} does not overlap others as it did when the graphs were saved")
            places[position] = base
        self.bases = [0 if place is None else place for place in places]  # a span without a tensor: nothing refers to it
        self.device = self.device or 0
        self._check_places(engine, rows)

    def _address(self, row: EngineTensor) -> int:
        """The address of the caller's tensor, checked against `row` and the common device."""
        name = repr(row.name)
        try:
            value = self.library.writable(self.by_name[row.name], row.name)
            address, shape, dtype, strides, device = self.library.describe(value)
        except (AttributeError, RuntimeError, CallError) as error:
            raise _unlike(f"tensor {name} cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}") from None
        if device is None or device < 0 or (self.device is not None and device != self.device):
            where = "the CPU" if device is None else f"GPU {device}" if device >= 0 else "another device"
            place = "a GPU" if self.device is None else f"GPU {self.device}"
            raise _unlike(f"tensor {name}: expected one on {place}, got one on {where}")
        self.device = device
        steps = dense(shape) if strides is None else tuple(strides)
        if (dtype, tuple(shape)) != (row.dtype, row.shape) or moving(shape, steps) != moving(row.shape, row.strides):
            expected, got = _layout(row.dtype, row.shape, row.strides), _layout(dtype, tuple(shape), steps)
            raise _unlike(f"tensor {name}: expected {expected}, got {got}")
        return address

    def _check_places(self, engine: Engine, rows: list[EngineTensor]) -> None:
        names = {span_of_tensor(engine, row): row.name for row in reversed(rows)}
        last, owner = 0, ""
        for base, position in sorted((self.bases[position], position) for position in names if position is not None):
            row, name = engine.spans[position], names[position]
            if base % row.alignment:
                raise _unlike(f"tensor {name!r} lies at {base:#x}, expected a multiple of {row.alignment}")
            if base < last:
                raise _unlike(f"tensors {owner!r} and {name!r} overlap, and did not when the graphs were saved")
            last, owner = base + row.bytes, name


def _layout(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    plain = moving(shape, strides) == moving(shape, dense(shape))
    return f"{dtype} {list(shape)}" + ("" if plain else f", strides {list(strides)}")


def _unlike(text: str) -> CallError:
    return CallError("tensors-unlike", text)


def _attached(bundle: Archive, engine: Engine, placed: _Tensors, lazy: bool | None, poison: int | None) -> AttachedGraphs:
    assert placed.device is not None
    shared = DeviceBundle(bundle, placed.device, "graph", poison, None, None)
    context, cleanup, images = shared.context, ExitStack(), kernel_images(bundle.manifest)
    moves = _moves(engine, placed.bases, shared.sizes["inputs"])
    sizes = {"arena": shared.sizes["arena"]}

    def executor(position: int) -> GraphExecutor:
        table = checked_table(bundle, position, images)
        return GraphExecutor(context, moved(table, moves) or table, modules, memories.bases, context.stream, poison)

    with ExitStack() as undo:
        undo.callback(shared.release)
        undo.callback(_free, context, cleanup)
        with context, Relaxed():
            memories = Memories(sizes, {"weights": shared.base}, cleanup, context.stream)
            if poison is not None:
                memories.poison(poison, context.stream)
            modules = shared.modules(memories, cleanup)
            attached = AttachedGraphs(shared, cleanup, executor, engine, placed)
            shared.settle()
            call("cuStreamSynchronize", context.stream)
            attached.tensors = MappingProxyType(_arena_tensors(engine, memories, placed, attached))
        for _ in attached._rest() if lazy is False else ():
            pass
        code, tables = shared.sizes.get("code", 0), shared.sizes.get("weights", 0)
        attached.memory = MappingProxyType({"arena": sizes["arena"], "weights": tables, "code": code})
        undo.pop_all()
    if lazy is None:
        attached._background = Background(attached._rest())
    return attached


def _free(context: Context, cleanup: ExitStack) -> None:
    with context, Relaxed(), cleanup:
        pass


def _moves(engine: Engine, bases: list[int], size: int) -> list[Move]:
    """Each span extends to the next one: an address one past the end of a tensor moves with it."""
    ends = [*[row.offset for row in engine.spans[1:]], size]
    return [
        Move(memory=INPUTS, begin=row.offset, end=end, to=ABSOLUTE, offset=base)
        for row, end, base in zip(engine.spans, ends, bases, strict=True)
    ]


def _arena_tensors(engine: Engine, memories: Memories, placed: _Tensors, owner: object) -> dict[str, Any]:
    return {
        row.name: placed.library.wrap(
            memories.address("arena", row.offset), row.dtype, row.shape, row.strides, owner, placed.device
        )
        for row in engine.tensors
        if row.memory == "arena" and span_of(row.dtype, row.shape, row.strides)
    }
