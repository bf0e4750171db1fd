"""A loaded bundle: guards, dispatch, replay, results."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from .call.guards import check_dtype
from .call.plan import Part, Plan, Slices, place_of_key, plan
from .call.views import CLOSED, Epoch, View
from .errors import CallError
from .format.pytree import builder, flattener
from .format.schema import Manifest
from .session.sessions import OWN, Family
from .session.state import Keeper, State, fetch, reset, seed
from .tensors.interface import Aliaser, Library, Place
from .tensors.libraries import Plain, library_of
from .tensors.tensor import Tensor, is_dense

_Run = tuple[Library, int | None, Any]
"""How one call runs: the caller's library, the device that its tensors lie on, and what the backend's turn gave.  A plain tuple:
every call makes one."""

PLANS = 4096
"""Shapes of calls whose plans are remembered; beyond that all are forgotten and made again as needed."""


class Results(Protocol):
    """The outputs of one replay.  `addresses` are valid while this object lives; `device` is the CUDA device that they lie on,
    None for the CPU; `static` says that every replay of this program gives these same addresses."""

    @property
    def addresses(self) -> Sequence[int]: ...

    @property
    def device(self) -> int | None: ...

    @property
    def static(self) -> bool: ...


class Backend(Keeper, Protocol):
    """What runs programs.  `device`: the CUDA device whose tensors it takes beside those of the CPU, or None.  `turn(stream)` is
    held from the first use of the program's memory to the last, since replays that share memory take turns; what it gives is handed
    to `run`.  It raises ProgramClosed after `close`, which waits for the turns that are held and may be called twice; in a session,
    SessionBusy while another thread holds one."""

    def session(self) -> Backend:
        """The same programs with memory of their own, over the same weights and code."""

    def buffers(self, program: int) -> tuple[list[int], object]:
        """The addresses of a program's static input buffers on the device, and what keeps them alive."""

    def run(self, program: int, addresses: Sequence[int], device: int | None, turn: Any) -> Results:
        """Replays a program on inputs at `addresses` of `device`, laid out as its values say; the outputs lie on the same
        device."""

    def poison(self, byte: int) -> None: ...

    def close(self) -> None: ...


class Program:
    """A model, ready to be called.  Made by `cgbundle.load`, when several threads may call it and take turns where they have to, or
    by `session`, when one thread at a time may; a context manager that closes.

    `int_keys` are the recorded sizes, as tuples in the order of the declared dimensions; `inputs` and `outputs` the signature
    (`TensorSpec`s); `memory` the bytes of each memory; `state` what the model keeps from call to call (see `state.State`);
    `manifest` everything else.
    """

    def __init__(self, manifest: Manifest, backend: Backend, on_miss: str, outputs: str) -> None:
        self.manifest = manifest
        self.int_keys = tuple([program.key for program in manifest.programs])
        self.inputs, self.outputs = manifest.inputs, manifest.outputs
        self.memory = dict(manifest.memories)
        self._backend, self._on_miss, self._views = backend, on_miss, outputs == "view"
        self._flatten: Callable[..., Sequence[Any]] = flattener(manifest.call)
        self._build = builder(manifest.result)
        self._rows = [tuple([program.values[index] for index in program.outputs]) for program in manifest.programs]
        self._row_major = [spec.order == tuple(range(len(spec.order))) for spec in manifest.inputs]
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._libraries: dict[type, Library] = {}
        self._aliases: dict[tuple[str, int], list[Any]] = {}  # by library and program, of outputs that stay in place
        self._aliasers: dict[tuple[str, int], list[Aliaser]] = {}  # likewise, of outputs that do not
        self._epoch = Epoch()
        self.state = State(manifest, backend)
        self._family = Family()
        self._finalizer = weakref.finalize(self, backend.close)
        self._finalizer.atexit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays the model.

        Inputs as the model takes them, by position or by name: NumPy arrays, torch tensors, or anything that speaks DLPack, all of
        one kind.  The result is of the same kind, row-major, nested as the model's own.  Raises a CallError that names the input,
        the axis, what was expected and what came.
        """
        return self._build(self.replay(self._flatten(args, kwargs)))

    def replay(self, tensors: Sequence[Any]) -> list[Any]:
        """The call with its inputs and outputs flat, in the order of the signature.  Raises as a call does."""
        if len(tensors) != len(self.inputs):
            raise CallError("input-structure", f"expected {len(self.inputs)} inputs, got {len(tensors)}")
        library = self._libraries.get(type(tensors[0])) if tensors else None
        if library is None:
            library = self._library(tensors)
        values, places, shapes = [], [], []
        for tensor, spec in zip(tensors, self.inputs, strict=True):
            value, place = library.take(tensor, spec.name)
            if place[2] != spec.dtype:
                check_dtype(spec, place[2])
            values.append(value)
            places.append(place)
            shapes.append(place[1])
        device = self._device(places) if places else None
        plan = self._plans.get(tuple(shapes)) or self._plan(tuple(shapes))
        with self._backend.turn(None if device is None else library.stream(device)) as turn:
            self._epoch.number += 1  # in turn: from here on the outputs of the last replay may be overwritten
            run = (library, device, turn)
            made = self._exact(run, plan, values, places) if plan.exact else self._pieces(run, plan, values)
        if isinstance(library, Plain) and tensors and not self._views:
            made = [library.finish(value, tensors[0]) for value in made]
        return made

    # --- sessions and what lasts from call to call ------------------------------------------------------------

    def session(self) -> Program:
        """A further session of the model: state, static inputs, arena and stream of its own, over the same weights and kernels.

        Sessions run side by side, each in one thread at a time: a second thread raises SessionBusy.  Its state begins as it was
        when the bundle was made, its random numbers from a seed of its own.  Closed as a program is, or with the one that was
        loaded; collected when it is forgotten.  Raises ProgramClosed, OutOfMemory.
        """
        return self._family.open(self)

    @property
    def session_memory(self) -> dict[str, int]:
        """Bytes of each memory that one more session takes: on a GPU in steps of 2 MiB, and the driver's graphs beside them; on a
        CPU besides what the code needs during a call, and the `buffers` that are asked for."""
        return {name: size for name, size in self.memory.items() if name in OWN}

    def reset(self) -> None:
        """Brings back what all state held at first, in order with the calls; random numbers go on."""
        reset(self._backend)

    def seed(self, number: int) -> None:
        """Begins the random numbers anew: equal seeds give equal numbers, call by call.  Raises ValueError unless
        0 <= number < 2**63, StateMissing for a model that draws none."""
        seed(self._backend, self.manifest, number)

    def state_bytes(self, weight: int) -> bytes:
        """The bytes of number `weight` of the manifest's weights in the order of memory, when the calls before are done."""
        return fetch(self._backend, weight)

    def buffers(self, int_key: tuple[int, ...]) -> list[Tensor]:
        """The static input buffers of a recorded key, in the order of the signature, on the program's device, without gaps: a call
        with these tensors, or with other libraries' over them (`torch.from_dlpack`), copies nothing in.

        On a GPU those of all keys lie over each other: a call of another key overwrites them.  They are good until the session is
        closed.  Raises key-missing.
        """
        number = place_of_key(self.manifest, int_key)
        addresses, owner = self._backend.buffers(number)
        program = self.manifest.programs[number]
        rows = [program.values[index] for index in program.inputs]
        device = self._backend.device
        return [Tensor(at, row.dtype, row.shape, row.strides, owner, device) for at, row in zip(addresses, rows, strict=True)]

    def poison(self, byte: int) -> None:
        """Overwrites with `byte` what no replay may rely on: results must not change.  For verification."""
        self._backend.poison(byte)

    def close(self) -> None:
        """Waits for running calls, then frees everything; closing the program that was loaded closes its sessions.  Calling a
        closed program raises ProgramClosed; closing twice does nothing."""
        if self._backend.device is not None:
            self._epoch.number = CLOSED  # views of the GPU's memory end here
        self._family.close(self)
        self._backend.close()
        self._aliases.clear()
        self._finalizer.detach()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        keys = ", ".join(map(str, self.int_keys[:6])) + (", ..." if len(self.int_keys) > 6 else "")
        return f"<cgbundle.Program {self.manifest.name!r} for {self.manifest.target.arch}, int_keys {keys}>"

    def _library(self, tensors: Sequence[Any]) -> Library:
        kind = type(tensors[0]) if tensors else type(None)
        library = self._libraries.get(kind)
        if library is None:
            library = self._libraries[kind] = library_of(tensors[0] if tensors else None)
        return library

    def _plan(self, shapes: tuple[Any, ...]) -> Plan:
        if len(self._plans) >= PLANS:
            self._plans.clear()
        made = self._plans[shapes] = plan(self.manifest, shapes, self._on_miss)
        return made

    def _device(self, places: list[Place]) -> int | None:
        """Where all inputs lie: on the CPU, or on the program's GPU.  Raises input-device."""
        device = places[0][4]
        for place in places:
            if place[4] != device:
                raise self._wrong_device(places)
        if device is not None and device != self._backend.device:
            raise self._wrong_device(places)
        return device

    def _wrong_device(self, places: list[Place]) -> CallError:
        for spec, place in zip(self.inputs, places, strict=True):
            if place[4] is not None and place[4] != self._backend.device:
                here = "the CPU" if self._backend.device is None else f"the CPU or CUDA device {self._backend.device}"
                return CallError("input-device", f"input {spec.name!r}: expected a tensor on {here}, got one on device {place[4]}")
        other = next(index for index, place in enumerate(places) if place[4] != places[0][4])
        return CallError(
            "input-device", f"input {self.inputs[other].name!r}: lies on another device than input {self.inputs[0].name!r}"
        )

    def _exact(self, run: _Run, plan: Plan, values: list[Any], places: list[Place]) -> list[Any]:
        addresses = []
        for index, (address, shape, _, strides, _) in enumerate(places):
            if strides is not None or not self._row_major[index]:
                address = self._arranged(run, values, index, address, shape, strides)
            addresses.append(address)
        return self._hand_out(run, plan.parts[0].program, addresses, None)

    def _arranged(self, run: _Run, values: list[Any], index: int, address: int, shape: Any, strides: Any) -> int:
        """The address of an input laid out as the model wants it: its own, or that of a copy that takes its place in `values`."""
        order, library = self.inputs[index].order, run[0]
        if is_dense(shape, library.strides(values[index]) if strides is None else strides, order):
            return address
        values[index] = library.ordered(values[index], order)
        return library.read(values[index])[0]

    def _pieces(self, run: _Run, plan: Plan, values: list[Any]) -> list[Any]:
        if len(plan.parts) == 1:
            (part,) = plan.parts
            cut, addresses = self._cut(run, part, values)
            return self._hand_out(run, part.program, addresses, part.outputs)
        library, device, _ = run
        whole = [library.empty(spec.dtype, shape, device) for spec, shape in zip(self.outputs, plan.shapes, strict=True)]
        for part in plan.parts:
            cut, addresses = self._cut(run, part, values)
            for output, alias, (taken, placed) in zip(
                whole, self._outputs(run, part.program, addresses), part.outputs, strict=True
            ):
                output[placed] = alias[taken]
            del cut  # the inputs had to live until the replay was done with them
        return self._guarded(library, whole) if self._views else whole

    def _cut(self, run: _Run, part: Part, values: list[Any]) -> tuple[list[Any], list[int]]:
        """The part's inputs, cut out of the call's and filled up with zeros to the recorded shapes, and their addresses."""
        library, device, _ = run
        cut: list[Any] = []
        addresses = []
        for index, (value, (slices, shape)) in enumerate(zip(values, part.inputs, strict=True)):
            piece = value[slices] if slices else value  # NumPy makes a number of array[()], in memory of its own
            if tuple(piece.shape) != shape:
                padded = library.empty(self.inputs[index].dtype, shape, device)
                padded[tuple([slice(0, size) for size in piece.shape])] = piece
                piece = padded
            cut.append(piece)
            place = library.read(piece)
            addresses.append(self._arranged(run, cut, index, place[0], place[1], place[3]))
        return cut, addresses

    def _outputs(self, run: _Run, program: int, addresses: list[int]) -> list[Any]:
        """Replays, and gives the outputs as the caller's tensors over the runtime's memory."""
        library, device, turn = run
        results = self._backend.run(program, addresses, device, turn)
        place = (library.name, program)
        if results.static:
            known = self._aliases.get(place)
            if known is None:
                known = self._aliases[place] = [
                    library.alias(address, row.dtype, row.shape, row.strides, results, results.device)
                    for address, row in zip(results.addresses, self._rows[program], strict=True)
                ]
            return known
        makers = self._aliasers.get(place)
        if makers is None:
            rows = self._rows[program]
            makers = self._aliasers[place] = [library.aliaser(row.dtype, row.shape, row.strides) for row in rows]
        return [make(address, results) for make, address in zip(makers, results.addresses, strict=True)]

    def _hand_out(self, run: _Run, program: int, addresses: list[int], parts: Sequence[tuple[Slices, Slices]] | None) -> list[Any]:
        aliases = self._outputs(run, program, addresses)
        if parts is not None:
            aliases = [alias[taken] if taken else alias for alias, (taken, _) in zip(aliases, parts, strict=True)]
        if self._views:
            return self._guarded(run[0], aliases)
        copy = run[0].copy
        return [copy(alias) for alias in aliases]

    def _guarded(self, library: Library, values: list[Any]) -> list[Any]:
        epoch = self._epoch
        return [View(spec, value, library, epoch, epoch.number) for spec, value in zip(self.outputs, values, strict=True)]
