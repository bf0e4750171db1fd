"""An entry of a loaded bundle: one method of the model, ready to be called.  A call is guards -> plan -> inputs -> replay ->
outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CallError, CgbundleError
from ..format.schema import EntrySpec, Manifest
from ..tensors.detection import library_of
from ..tensors.library import Descriptor, Library
from ..tensors.tensor import Tensor
from .direct import Direct, DirectCalls, Output, replay
from .guards import common_device, unreadable, wrong_dtype
from .inputs import cut, lay_out
from .outputs import Call, Outputs, Session
from .plan import Plan, number_of_key, plan
from .structure import builder, flat_arguments, flattener
from .views import Epoch, View

if TYPE_CHECKING:
    from ..session.profile import Profile
    from .data_sizes import DataSizes
    from .output_aliases import OutputAliases
    from .written_inputs import WrittenInputs

PLANS = 4096
"""Shapes of calls whose plans are remembered; beyond that all are forgotten and made again as needed."""


class Entry:
    """An entry of a session.

    `name` is that of the model's method.  `int_keys` are the recorded sizes, as tuples in the order of the declared dimensions;
    `inputs` and `outputs` the signature (`TensorSpec`s); `spec` everything else about it (an `EntrySpec`), and `manifest` about the
    bundle.
    """

    def __init__(
        self, manifest: Manifest, spec: EntrySpec, session: Session, first: int, on_miss: str, outputs: str, cast: bool = False
    ) -> None:
        """`spec`: of the manifest's; `first`: the number of its first program among those of all entries."""
        self.manifest, self.spec, self.name = manifest, spec, spec.name
        self.int_keys = tuple([program.key for program in spec.programs])
        self.inputs, self.outputs = spec.inputs, spec.outputs
        self._session, self._first = session, first
        self._backend, self._on_miss, self._views = session.backend, on_miss, outputs == "view"
        self._cast = cast
        self._flatten: Callable[..., Sequence[Any]] = flattener(spec.call, spec.parameters)
        self._build: Callable[..., Any] = builder(spec.result)
        self._data_sizes: DataSizes | None = None
        if spec.data_sizes:
            from .data_sizes import DataSizes  # few bundles have any: a load without them stays light

            self._data_sizes = DataSizes(spec, session.backend)
            self._build = self._data_sizes.builder(self._build)
        self._flat = flat_arguments(spec.call, spec.parameters)  # of a call that is taken as it comes
        self._ends = (self._flatten, self._build, self._flat)
        self._row_major = [each.order == tuple(range(len(each.order))) for each in spec.inputs]
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._direct = DirectCalls()
        self._libraries: dict[type, Library] = {}
        self._aliases: OutputAliases | None = None
        self._written: WrittenInputs | None = None
        if spec.aliases:
            from .output_aliases import OutputAliases  # likewise

            self._aliases = OutputAliases(manifest, spec, session.backend, views=self._views)
        if spec.mutated_inputs:
            from .written_inputs import WrittenInputs  # likewise

            self._written = WrittenInputs(spec)
        donated = {donation.output for donation in manifest.donations if donation.source == spec.name}
        self._outputs = Outputs(spec, session, first, self._aliases, donated, views=self._views)
        self._held: Sequence[Any] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays the model.

        Inputs as the model takes them, by position or by name: NumPy arrays, torch tensors, or anything that speaks DLPack, all of
        one kind.  The result is of the same kind, row-major, nested as the model's own: an instance of a class of the model's is a
        Record of its fields, and is given as one, as a dict, or as whatever has these attributes.  Raises a
        CallError that names the input, the axis, what was expected and what came.
        """
        flat = args if len(args) == self._flat and not kwargs else self._flatten(args, kwargs)
        return self._build(self.replay_whole(flat))

    def replay(self, tensors: Sequence[Any]) -> list[Any]:
        """The call with its inputs and outputs flat, in the order of the signature.  Raises as a call does."""
        made = self.replay_whole(tensors)
        return made if self._data_sizes is None else self._data_sizes.cut(made)

    def replay_whole(self, tensors: Sequence[Any]) -> list[Any]:
        """As `replay`; outputs whose sizes depend on data are as they were recorded, with zeros behind what counts."""
        direct = self._direct.last
        if direct is not None:
            same = direct.like(tensors)
            if same is not None:
                return direct.replay(same[0], ())
            views = [each for each in tensors if type(each) is View] if self._views else []
            bare = [each.tensor if type(each) is View else each for each in tensors] if views else tensors
            found = self._direct.find(bare)
            if found is not None:
                direct, same = found
                return direct.replay(same[0], views)
        return self._replay(tensors)

    def _replay(self, tensors: Sequence[Any]) -> list[Any]:
        """A call of any kind; one that can be direct is the next time."""
        if len(tensors) != len(self.inputs):
            raise CallError("input-structure", f"expected {len(self.inputs)} inputs, got {len(tensors)}")
        views = {}
        if self._views and View in [type(each) for each in tensors]:
            views = {index: each for index, each in enumerate(tensors) if type(each) is View}
            tensors = [each.tensor if type(each) is View else each for each in tensors]
        first = tensors[0] if tensors else None
        library = self._libraries.get(type(first))
        if library is None:
            library = self._libraries[type(first)] = library_of(first)
        values: list[Any] = []
        found, shapes, casts = [], [], []
        for tensor, spec in zip(tensors, self.inputs, strict=True):
            try:
                value, descriptor = library.take(tensor, spec.name)
            except CallError as error:
                raise unreadable(error, spec, tensor) from None
            if descriptor[2] != spec.dtype:
                self._check_cast(len(values), descriptor)
                casts.append(len(values))
            values.append(value)
            found.append(descriptor)
            shapes.append(descriptor[1])
        device = common_device(self.inputs, found, self._backend.device) if found else None
        plan = self._plans.get(tuple(shapes)) or self._plan(tuple(shapes))
        for place in casts:  # behind the plan, which refuses what would fill the memory
            values[place] = value = library.cast(values[place], self.inputs[place].dtype)
            found[place] = library.describe(value)
            tensors = [*tensors[:place], value, *tensors[place + 1 :]]
        outputs, aliases, written = self._outputs, self._aliases, self._written
        shared = None if aliases is None else aliases.of_inputs(library, plan, tensors, values, found)
        targets = None if written is None else written.targets(library, tensors, values, found)
        try:
            backend = self._backend
            with backend.turn:
                stream = backend.begin(None if device is None else library.stream(device))
                try:
                    if views:
                        _check_views(views.values())
                    outputs.epoch.number += 1  # from here on the outputs of the last replay may be overwritten
                    if outputs.own is not None:
                        outputs.own.number += 1
                    call = (library, device, stream)
                    if plan.exact:
                        addresses = []
                        for index, (address, shape, _, strides, _) in enumerate(found):
                            if strides is not None or not self._row_major[index]:
                                address = lay_out(library, self.inputs[index].order, values, index, address, shape, strides)
                            addresses.append(address)
                        made = outputs.replay(call, plan.parts[0].program, addresses, None)
                        self._remember(library, plan, tensors, found)
                    else:
                        made = self._pieces(call, plan, values)
                finally:
                    backend.end(stream)
        except CgbundleError as error:
            from ..tensors.index_ranges import explained  # only where a call has failed

            changed = set(self.spec.mutated_buffers) - {self.manifest.random}
            raise explained(error, self.inputs, found, writes=bool(changed)) from None
        if library.name == "dlpack" and tensors and not self._views:
            made = [library.converted(value, first) for value in made]
        if written is not None and targets is not None:
            # an output of the CPU may lie in an input's memory: a view of it lasts until the next call, and so does the input
            self._held = values if self._views else ()
            written.copy_back(targets, values)
        if shared is not None:
            for index, value in shared.items():
                made[index] = next((view for place, view in views.items() if tensors[place] is value), value)
        return made

    def buffers(self, int_key: tuple[int, ...]) -> list[Tensor]:
        """The static input buffers of a recorded key, in the order of the signature, on the program's device, without gaps.  A call
        with these tensors, or with other libraries' over them (`torch.from_dlpack`), copies nothing in.

        On a GPU those of all keys lie over each other: a call of another key overwrites them.  They are good until the session is
        closed.  Raises key-missing.
        """
        number = number_of_key(self.spec, int_key)
        addresses, owner = self._backend.buffers(self._first + number)
        program = self.spec.programs[number]
        rows = [program.values[index] for index in program.inputs]
        device = self._backend.device
        return [Tensor(at, row.dtype, row.shape, row.strides, owner, device) for at, row in zip(addresses, rows, strict=True)]

    def warmup(self, *int_keys: tuple[int, ...]) -> None:
        """`Program.warmup` for this entry: calls of each of `int_keys`, of all its recorded ones where none is given.  Raises
        key-missing, and what a call raises."""
        from ..session.warmup import warm_up  # what does not need it loads faster

        for key in int_keys:
            number_of_key(self.spec, key)
        warm_up(self._session, self.manifest, [(self.spec, key, self.replay) for key in int_keys or self.int_keys])

    def watch(self, profile: Profile | None) -> None:
        """From now on calls are told to a profile; None ends it."""
        self._direct.clear()  # they go round the steps that a profile times
        self._flatten, self._build, self._flat = self._ends
        if profile is not None:
            self._flatten, self._build, self._flat = profile.begin(self._flatten), profile.end(self._build), -1

    @property
    def epoch(self) -> Epoch:
        """What counts the calls that make views of this entry's outputs stale: its own where they are donated."""
        return self._outputs.own or self._outputs.epoch

    def forget(self) -> None:
        """Lets go of what calls have kept; for a session that is closed."""
        self._outputs.close()
        self._direct.clear()
        self._held = ()

    def __repr__(self) -> str:
        keys = ", ".join(map(str, self.int_keys[:6])) + (", ..." if len(self.int_keys) > 6 else "")
        return f"<cgbundle.Entry {self.name!r} of {self.manifest.name!r}, int_keys {keys}>"

    def _plan(self, shapes: tuple[Any, ...]) -> Plan:
        if len(self._plans) >= PLANS:
            self._plans.clear()
        made = self._plans[shapes] = plan(self.spec, shapes, self._on_miss)
        return made

    def _remember(self, library: Library, plan: Plan, tensors: Sequence[Any], found: Sequence[Descriptor]) -> None:
        """Puts down what calls with inputs like these need, where they can be direct."""
        program = plan.parts[0].program
        outputs = self._outputs.static(library, program)
        converted = library.name == "dlpack" and not self._views
        if outputs is None or not found or found[0][4] is None or self._aliases or self._written or converted:
            return
        if not all(self._row_major) or any(descriptor[3] is not None for descriptor in found):
            return
        rows = [Output(*row) for row in zip(self.outputs, outputs, self._outputs.epochs, strict=True)]
        counts = [each for each in (self._outputs.epoch, self._outputs.own) if each is not None]
        line = replay(self._backend, library, self._first + program, rows, counts, views=self._views)
        self._direct.add(tensors, Direct(library.like(tensors), line))

    def _check_cast(self, place: int, found: Descriptor) -> None:
        """Raises input-dtype for an input of another dtype, unless `cast=True` allows the cast."""
        from ..tensors.casts import is_safe  # few calls need one

        spec, written = self.inputs[place], place in self.spec.mutated_inputs
        if written or not self._cast or not is_safe(found[2], spec.dtype):
            raise wrong_dtype(spec, found[2], written=written)

    def _pieces(self, call: Call, plan: Plan, values: list[Any]) -> list[Any]:
        """The outputs of a call that is padded or chunked."""
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


def _check_views(tensors: Iterable[Any]) -> None:
    """Raises stale-view where another thread's call came between a view's check and this call, which has the lock by now."""
    for each in tensors:
        if type(each) is View:
            each.tensor  # noqa: B018
