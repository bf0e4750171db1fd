"""A loaded bundle: guards, dispatch, replay, results."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from .arrays import Library, Plain, library_of
from .errors import InputDevice, ProgramClosed
from .guards import check_dtype
from .plans import Part, Plan, Slices, plan
from .schema import Manifest
from .structure import builder, flattener
from .tensor import is_dense
from .views import Epoch, View

PLANS = 4096
"""Shapes of calls whose plans are remembered; beyond that all are forgotten and made again as needed."""


class Results(Protocol):
    """The outputs of one replay: `addresses` are valid while this object lives."""

    addresses: list[int]


class Backend(Protocol):
    """What runs programs: `run` takes the position of a program and the addresses of its inputs, laid out as its values say."""

    def run(self, program: int, addresses: Sequence[int]) -> Results: ...

    def close(self) -> None: ...


class Program:
    """A model, ready to be called.  Made by `cgbundle.load`; safe to call from several threads; a context manager that closes.

    `int_keys` are the recorded sizes, as tuples in the order of the declared dimensions; `inputs` and `outputs` the signature
    (`TensorSpec`s); `memory` the bytes of each memory; `manifest` everything else.
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
        self._epoch = Epoch()
        self._gate = threading.Condition()
        self._running = 0
        self._closed = False
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
        library = self._library(tensors)
        self._enter()
        try:
            values, places = [], []
            for tensor, spec in zip(tensors, self.inputs, strict=True):
                value = library.accept(tensor, spec.name)
                place = library.read(value)
                if place[2] != spec.dtype:
                    check_dtype(spec, place[2])
                if place[4] is not None:
                    raise InputDevice(
                        f"input {spec.name!r}: expected a tensor on the CPU, got one on device {place[4]}", "call .cpu() on it"
                    )
                values.append(value)
                places.append(place)
            shapes = tuple([place[1] for place in places])
            plan = self._plans.get(shapes) or self._plan(shapes)
            made = self._exact(library, plan, values, places) if plan.exact else self._pieces(library, plan, values)
        finally:
            self._leave()
        if isinstance(library, Plain) and tensors and not self._views:
            made = [library.finish(value, tensors[0]) for value in made]
        return made

    def close(self) -> None:
        """Waits for running calls, then frees everything.  Calling a closed program raises ProgramClosed; closing twice does
        nothing."""
        with self._gate:
            self._closed = True
            self._gate.wait_for(lambda: self._running == 0)
        self._finalizer()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        keys = ", ".join(map(str, self.int_keys[:6])) + (", ..." if len(self.int_keys) > 6 else "")
        return f"<cgbundle.Program {self.manifest.name!r} for {self.manifest.target.arch}, int_keys {keys}>"

    def _enter(self) -> None:
        with self._gate:
            if self._closed:
                raise ProgramClosed(f"program {self.manifest.name!r} was closed")
            self._running += 1
            self._epoch.number += 1

    def _leave(self) -> None:
        with self._gate:
            self._running -= 1
            if self._closed:
                self._gate.notify_all()

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

    def _exact(self, library: Library, plan: Plan, values: list[Any], places: list[Any]) -> list[Any]:
        addresses = []
        for index, (address, shape, _, strides, _) in enumerate(places):
            if strides is not None or not self._row_major[index]:
                address = self._arranged(library, values, index, address, shape, strides)
            addresses.append(address)
        program = plan.parts[0].program
        results = self._backend.run(program, addresses)
        return self._hand_out(library, program, results, None)

    def _arranged(self, library: Library, values: list[Any], index: int, address: int, shape: Any, strides: Any) -> int:
        """The address of an input laid out as the model wants it: its own, or that of a copy that takes its place in `values`."""
        order = self.inputs[index].order
        if is_dense(shape, library.strides(values[index]) if strides is None else strides, order):
            return address
        values[index] = library.ordered(values[index], order)
        return library.read(values[index])[0]

    def _pieces(self, library: Library, plan: Plan, values: list[Any]) -> list[Any]:
        if len(plan.parts) == 1:
            (part,) = plan.parts
            results = self._run_part(library, part, values)
            return self._hand_out(library, part.program, results, part.outputs)
        whole = [library.empty(spec.dtype, shape) for spec, shape in zip(self.outputs, plan.shapes, strict=True)]
        for part in plan.parts:
            results = self._run_part(library, part, values)
            for output, alias, (taken, placed) in zip(
                whole, self._aliases(library, part.program, results), part.outputs, strict=True
            ):
                output[placed] = alias[taken]
        return self._guarded(library, whole) if self._views else whole

    def _run_part(self, library: Library, part: Part, values: list[Any]) -> Results:
        """Cuts the part's inputs out of the call's and fills them up with zeros to the recorded shapes."""
        cut: list[Any] = []
        addresses = []
        for index, (value, (slices, shape)) in enumerate(zip(values, part.inputs, strict=True)):
            piece = value[slices]
            if tuple(piece.shape) != shape:
                padded = library.empty(self.inputs[index].dtype, shape)
                padded[tuple([slice(0, size) for size in piece.shape])] = piece
                piece = padded
            cut.append(piece)
            address, shape, _, strides, _ = library.read(piece)
            addresses.append(self._arranged(library, cut, index, address, shape, strides))
        return self._backend.run(part.program, addresses)

    def _aliases(self, library: Library, program: int, results: Results) -> list[Any]:
        return [
            library.alias(address, row.dtype, row.shape, row.strides, results)
            for address, row in zip(results.addresses, self._rows[program], strict=True)
        ]

    def _hand_out(
        self, library: Library, program: int, results: Results, parts: Sequence[tuple[Slices, Slices]] | None
    ) -> list[Any]:
        aliases = self._aliases(library, program, results)
        if parts is not None:
            aliases = [alias[taken] for alias, (taken, _) in zip(aliases, parts, strict=True)]
        if self._views:
            return self._guarded(library, aliases)
        return [library.copy(alias) for alias in aliases]

    def _guarded(self, library: Library, values: list[Any]) -> list[Any]:
        return [View(spec.name, spec.dtype, value, library, self._epoch) for spec, value in zip(self.outputs, values, strict=True)]
