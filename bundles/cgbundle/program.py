"""A loaded bundle.  A call is guards -> plan -> inputs -> replay -> outputs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .call.guards import common_device, unreadable, wrong_dtype
from .call.inputs import cut, lay_out
from .call.outputs import Call, Outputs
from .call.plan import Plan, number_of_key, plan
from .call.structure import builder, flattener
from .errors import CallError, MachineError
from .format.schema import KERNEL_CODE, Manifest
from .session.locks import closed
from .session.sessions import PER_SESSION, Sessions
from .session.state import State
from .tensors.detection import library_of
from .tensors.library import Descriptor, Library
from .tensors.tensor import Tensor

if TYPE_CHECKING:
    from .call.output_aliases import OutputAliases
    from .call.written_inputs import WrittenInputs
    from .format.open_files import KeptFile
    from .format.safetensors import Mapped
    from .session.backend import Backend
    from .session.profile import Profile

PLANS = 4096
"""Shapes of calls whose plans are remembered; beyond that all are forgotten and made again as needed."""


class Program:
    """A model, ready to be called; a context manager that closes.

    Made by `cgbundle.load`, when several threads may call it and wait for each other where they have to, or by `session`, when one
    thread at a time may.

    `int_keys` are the recorded sizes, as tuples in the order of the declared dimensions; `inputs` and `outputs` the signature
    (`TensorSpec`s); `memory` the bytes of each memory; `state` what the model keeps from call to call (see `state.State`);
    `manifest` everything else.
    """

    def __init__(
        self, manifest: Manifest, backend: Backend, on_miss: str, outputs: str, cast: bool = False, exam: KeptFile | None = None
    ) -> None:
        """`exam`: the bundle's, which `warmup` and `open_exam` read."""
        self.manifest, self._exam = manifest, exam
        self.int_keys = tuple([program.key for program in manifest.programs])
        self.inputs, self.outputs = manifest.inputs, manifest.outputs
        self.memory = dict(manifest.memories)
        self._backend, self._on_miss, self._views = backend, on_miss, outputs == "view"
        self._cast = cast
        self._flatten: Callable[..., Sequence[Any]] = flattener(manifest.call, manifest.parameters)
        self._build = builder(manifest.result)
        self._row_major = [spec.order == tuple(range(len(spec.order))) for spec in manifest.inputs]
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._libraries: dict[type, Library] = {}
        self._aliases: OutputAliases | None = None
        self._written: WrittenInputs | None = None
        if manifest.aliases:
            from .call.output_aliases import OutputAliases  # few bundles have any: a load without them stays light

            self._aliases = OutputAliases(manifest, backend, views=self._views)
        if manifest.written:
            from .call.written_inputs import WrittenInputs  # likewise

            self._written = WrittenInputs(manifest)
        self._outputs = Outputs(manifest, backend, self._aliases, views=self._views)
        self._held: Sequence[Any] = ()
        self.state = State(manifest, backend)
        self._root: Program | None = None
        self._sessions = Sessions()
        self._finalizer = weakref.finalize(self, backend.close)
        self._finalizer.atexit = False
        if manifest.random >= 0:  # every session draws random numbers of its own
            try:
                self.seed(int.from_bytes(os.urandom(8), "little") >> 1)
            except BaseException:
                self.close()
                raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays the model.

        Inputs as the model takes them, by position or by name: NumPy arrays, torch tensors, or anything that speaks DLPack, all of
        one kind.  The result is of the same kind, row-major, nested as the model's own: an instance of a class of the model's is a
        record of its fields (call/records.py), and is given as one, as a dict, or as whatever has these attributes.  Raises a
        CallError that names the input, the axis, what was expected and what came.
        """
        return self._build(self.replay(self._flatten(args, kwargs)))

    def replay(self, tensors: Sequence[Any]) -> list[Any]:
        """The call with its inputs and outputs flat, in the order of the signature.  Raises as a call does."""
        if len(tensors) != len(self.inputs):
            raise CallError("input-structure", f"expected {len(self.inputs)} inputs, got {len(tensors)}")
        first = tensors[0] if tensors else None
        library = self._libraries.get(type(first))
        if library is None:
            library = self._libraries[type(first)] = library_of(first)
        values: list[Any] = []
        found, shapes = [], []
        for tensor, spec in zip(tensors, self.inputs, strict=True):
            try:
                value, descriptor = library.take(tensor, spec.name)
            except CallError as error:
                raise unreadable(error, spec, tensor) from None
            if descriptor[2] != spec.dtype:
                place = len(values)
                value, descriptor = self._cast_input(library, place, value, descriptor)
                tensors = [*tensors[:place], value, *tensors[place + 1 :]]
            values.append(value)
            found.append(descriptor)
            shapes.append(descriptor[1])
        device = common_device(self.inputs, found, self._backend.device) if found else None
        plan = self._plans.get(tuple(shapes)) or self._plan(tuple(shapes))
        outputs, aliases, written = self._outputs, self._aliases, self._written
        shared = None if aliases is None else aliases.of_inputs(library, plan, tensors, values, found)
        targets = None if written is None else written.targets(library, tensors, values, found)
        try:
            with self._backend.locked(None if device is None else library.stream(device)) as stream:
                outputs.epoch.number += 1  # from here on the outputs of the last replay may be overwritten
                call = (library, device, stream)
                if plan.exact:
                    addresses = []
                    for index, (address, shape, _, strides, _) in enumerate(found):
                        if strides is not None or not self._row_major[index]:
                            address = lay_out(library, self.inputs[index].order, values, index, address, shape, strides)
                        addresses.append(address)
                    made = outputs.replay(call, plan.parts[0].program, addresses, None)
                else:
                    made = self._pieces(call, plan, values)
        except MachineError as error:
            from .call.index_ranges import explained  # only where a call has failed

            raise explained(error, self.inputs, found) from None
        if library.name == "dlpack" and tensors and not self._views:
            made = [library.converted(value, first) for value in made]
        if written is not None and targets is not None:
            # an output of the CPU may lie in an input's memory: a view of it lasts until the next call, and so does the input
            self._held = values if self._views else ()
            written.copy_back(targets, values)
        if shared is not None:
            for index, value in shared.items():
                made[index] = value
        return made

    # --- sessions and what lasts from call to call ------------------------------------------------------------

    def session(self) -> Program:
        """A further session of the model: state, static inputs, arena and stream of its own, over the same weights and kernels.

        Sessions run side by side, each in one thread at a time: a second thread raises SessionBusy.  Its state begins as it was
        when the bundle was made, its random numbers from a seed of its own.  Closed as a program is, or with the one that was
        loaded; collected when it is forgotten.  Raises ProgramClosed, OutOfMemory.
        """
        root = self._root or self
        policies = (root._on_miss, "view" if root._views else "copy", root._cast)
        made = Program(root.manifest, root._backend.session(), *policies, root._exam)
        made._root = root
        if not root._sessions.add(made):
            made.close()
            raise closed(root.manifest.name)
        return made

    @property
    def session_memory(self) -> dict[str, int]:
        """Bytes of each memory that one more session takes: on a GPU in steps of 2 MiB, and the driver's graphs beside them; on a
        CPU besides what the code needs during a call, and the `buffers` that are asked for.  `code`: the kernel images with
        variables that kernels may write, of which each session loads its own; not named where there are none."""
        sizes = {name: size for name, size in self.memory.items() if name in PER_SESSION}
        code = self._backend.code_bytes
        return {**sizes, KERNEL_CODE: code} if code else sizes

    def reset(self) -> None:
        """Brings back what all state held at first, in order with the calls; random numbers go on."""
        self.state.reset()

    def seed(self, number: int) -> None:
        """Begins the random numbers anew: equal seeds give equal numbers, call by call.  Raises ValueError unless
        0 <= number < 2**63, StateMissing for a model that draws none."""
        self.state.seed(number)

    def state_bytes(self, weight: int) -> bytes:
        """The bytes of number `weight` of the manifest's weights in the order of memory, when the calls before are done."""
        return self.state.fetch(weight)

    def warmup(self, *int_keys: tuple[int, ...]) -> None:
        """Pays the costs of first calls ahead: reads the weights, builds what `lazy=True` put off, and makes a call of each of
        `int_keys` (default: all recorded ones), with the inputs that the build proved it with.

        State and random numbers are then what they were; views that were handed out are stale.  OpenMP's threads belong to the
        thread that calls: do it in the one that serves.  Raises key-missing, and what a call raises.
        """
        from .session.warmup import warm_up  # what does not need it loads faster

        if self._exam is None:
            raise closed(self.manifest.name)
        for key in int_keys:
            number_of_key(self.manifest, key)
        calls = [(self.manifest, key, self.replay) for key in int_keys or self.int_keys]
        warm_up(self.manifest, self._backend, self._exam, calls)

    def profile(self) -> Profile:
        """Times the calls that are made inside `with program.profile() as profile:`, and every step of theirs.

        `print(profile)` shows a table, `profile.save("trace.json")` writes a Chrome trace, which chrome://tracing and Perfetto
        read, `profile.rows()` and `profile.spans` are the numbers.  On a GPU steps are timed there, by two events each.
        """
        from .session.profile import Profile  # few programs are profiled

        return Profile(self.manifest.name, self._watch)

    def buffers(self, int_key: tuple[int, ...]) -> list[Tensor]:
        """The static input buffers of a recorded key, in the order of the signature, on the program's device, without gaps.  A call
        with these tensors, or with other libraries' over them (`torch.from_dlpack`), copies nothing in.

        On a GPU those of all keys lie over each other: a call of another key overwrites them.  They are good until the session is
        closed.  Raises key-missing.
        """
        number = number_of_key(self.manifest, int_key)
        addresses, owner = self._backend.buffers(number)
        program = self.manifest.programs[number]
        rows = [program.values[index] for index in program.inputs]
        device = self._backend.device
        return [Tensor(at, row.dtype, row.shape, row.strides, owner, device) for at, row in zip(addresses, rows, strict=True)]

    def open_exam(self) -> Mapped:
        """The exam of the bundle that was loaded, to be closed by the caller.  For verification.  Raises ProgramClosed,
        weights-invalid."""
        from .format.archive import EXAM  # no call needs it
        from .format.safetensors import Mapped

        if self._exam is None:
            raise closed(self.manifest.name)
        return Mapped(self._exam.descriptor, EXAM)

    def poison(self, byte: int) -> None:
        """Overwrites with `byte` what no replay may rely on: results must not change.  For verification."""
        self._backend.poison(byte)

    def close(self) -> None:
        """Waits for running calls, then frees everything; closing the program that was loaded closes its sessions.  Calling a
        closed program raises ProgramClosed; closing twice does nothing."""
        if self._backend.device is not None:
            self._outputs.epoch.closed = True  # views of the GPU's memory end here, also those that a running call will give
        self._sessions.close()
        self._backend.close()
        self._outputs.close()
        self._held, self._exam = (), None
        self._finalizer.detach()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        keys = ", ".join(map(str, self.int_keys[:6])) + (", ..." if len(self.int_keys) > 6 else "")
        return f"<cgbundle.Program {self.manifest.name!r} for {self.manifest.target.arch}, int_keys {keys}>"

    def _watch(self, profile: Profile | None) -> None:
        self._backend.watch(profile)
        self._flatten, self._build = flattener(self.manifest.call, self.manifest.parameters), builder(self.manifest.result)
        if profile is not None:
            self._flatten, self._build = profile.begin(self._flatten), profile.end(self._build)

    def _plan(self, shapes: tuple[Any, ...]) -> Plan:
        if len(self._plans) >= PLANS:
            self._plans.clear()
        made = self._plans[shapes] = plan(self.manifest, shapes, self._on_miss)
        return made

    def _cast_input(self, library: Library, place: int, value: Any, found: Descriptor) -> tuple[Any, Descriptor]:
        """An input that came in another dtype, cast as `cast=True` allows; raises input-dtype."""
        from .tensors.casts import is_safe  # few calls need one

        spec, written = self.inputs[place], place in self.manifest.written
        if written or not self._cast or not is_safe(found[2], spec.dtype):
            raise wrong_dtype(spec, found[2], written=written)
        value = library.cast(value, spec.dtype)
        return value, library.describe(value)

    def _pieces(self, call: Call, plan: Plan, values: list[Any]) -> list[Any]:
        """The outputs of a call that is padded or cut."""
        library, device, _ = call
        outputs = self._outputs
        if len(plan.parts) == 1:
            (part,) = plan.parts
            kept, addresses = cut(library, device, self.inputs, part, values)
            return outputs.replay(call, part.program, addresses, part.outputs)
        whole = [library.empty(spec.dtype, shape, device) for spec, shape in zip(self.outputs, plan.shapes, strict=True)]
        for part in plan.parts:
            kept, addresses = cut(library, device, self.inputs, part, values)
            outputs.replay_into(whole, call, part, addresses)
            del kept  # the inputs had to live until the replay was done with them
        return outputs.guard(library, whole) if self._views else whole
