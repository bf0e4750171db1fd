"""An entry of a loaded bundle. A call takes the fast path if its guard passes, else guards -> plan -> inputs -> replay ->
outputs."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ..errors import CallError, CgbundleError
from ..format.pytree import children
from ..format.schema import EntrySpec, Manifest, Tree
from ..format.shapes import is_dense
from ..tensors.library import Descriptor, Library, library_of
from .outputs import Call, Epoch, Known, KnownCalls, Outputs, Session, StaticOutput, View, replay
from .plan import Part, Plan, common_device, number_of_key, plan

if TYPE_CHECKING:
    from ..tensors.tensor import Tensor
    from .aliasing import MutatedInputs, OutputAliases
    from .profile import Profile
    from .structure import DataSizes

PLANS = 4096  # cached plans; above this number the cache is cleared


class Entry:
    """An entry of a session.

    `name` is the name of the model's method.  `int_keys` are the recorded sizes, as tuples in the order of the declared dimensions.
    `inputs` and `outputs` are the signature (`TensorSpec`s).  `spec` has all other data of the entry (an `EntrySpec`), and
    `manifest` that of the bundle.
    """

    def __init__(
        self, manifest: Manifest, spec: EntrySpec, session: Session, first: int, on_miss: str, outputs: str, cast: bool = False
    ) -> None:
        """`first`: the number of the entry's first program among those of all entries."""
        self.manifest, self.spec, self.name = manifest, spec, spec.name
        self.int_keys = tuple([program.key for program in spec.programs])
        self.inputs, self.outputs = spec.inputs, spec.outputs
        self._session, self._first, self._cast = session, first, cast
        self._backend, self._on_miss, self._views = session.backend, on_miss, outputs == "view"
        self._flatten: Callable[..., Sequence[Any]] = _flattener(spec)
        self._build: Callable[..., Any] = builder(spec.result)
        self._data_sizes: DataSizes | None = None
        self._aliases: OutputAliases | None = None
        self._mutated: MutatedInputs | None = None
        if spec.data_sizes:
            from .structure import DataSizes  # few bundles have any

            self._data_sizes, build = DataSizes(spec, session.backend), self._build
            cut = self._data_sizes.cut
            self._build = lambda outputs: build(cut(outputs))
        if spec.aliases or spec.mutated_inputs:
            from .aliasing import MutatedInputs, OutputAliases  # likewise

            self._aliases = OutputAliases(manifest, spec, session.backend, views=self._views) if spec.aliases else None
            self._mutated = MutatedInputs(spec) if spec.mutated_inputs else None
        trees = [tree for _, tree in spec.call["call"]]
        flat = not any(parameter.keyword for parameter in spec.parameters) and all("tensor" in tree for tree in trees)
        self._flat = len(trees) if flat else -1  # number of arguments of calls that need no flattening; -1: all need it
        self._ends = (self._flatten, self._build, self._flat)
        self._row_major = [tensor.order == tuple(range(len(tensor.order))) for tensor in spec.inputs]
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._known = KnownCalls()
        self._libraries: dict[type, Library] = {}
        donated = {donation.output for donation in manifest.donations if donation.source == spec.name}
        self._outputs = Outputs(spec, session, first, self._aliases, donated, views=self._views)
        self._kept_inputs: Sequence[Any] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays the model.

        Takes the arguments of the model, by position or by name: NumPy arrays, torch tensors, or other tensors with DLPack, all
        from one library.  Returns tensors of the same library, row-major, nested as in the model.  An instance of one of the
        model's classes is returned as a Record.  An argument of such a class may be a Record, a dict, or an object with these
        attributes.  Raises a CallError that names the input, the axis, what was expected, and the actual value.
        """
        flat = args if len(args) == self._flat and not kwargs else self._flatten(args, kwargs)
        return self._build(self.replay_whole(flat))

    def replay(self, tensors: Sequence[Any]) -> list[Any]:
        """A call with lists of inputs and outputs, in the order of the signature.  Raises the errors of a call."""
        outputs = self.replay_whole(tensors)
        return outputs if self._data_sizes is None else self._data_sizes.cut(outputs)

    def replay_whole(self, tensors: Sequence[Any]) -> list[Any]:
        """As `replay`. Outputs whose sizes depend on data have their recorded size, with zeros after the valid elements."""
        known = self._known.last
        if known is not None:
            passed = known.guard(tensors)
            if passed is not None:
                return known.replay(passed[0], ())
            views = [tensor for tensor in tensors if type(tensor) is View] if self._views else []
            match = self._known.find(_bare(tensors) if views else tensors)
            if match is not None:
                known, passed = match
                return known.replay(passed[0], views)
        return self._replay(tensors)

    def _replay(self, tensors: Sequence[Any]) -> list[Any]:
        """A call without the fast path, which it prepares for the next call."""
        if len(tensors) != len(self.inputs):
            raise CallError("input-structure", f"expected {len(self.inputs)} inputs, got {len(tensors)}")
        views: dict[int, View] = {}
        if self._views and View in [type(tensor) for tensor in tensors]:
            views = {index: tensor for index, tensor in enumerate(tensors) if type(tensor) is View}
            tensors = _bare(tensors)
        first = tensors[0] if tensors else None
        library = self._libraries.get(type(first))
        if library is None:
            library = self._libraries[type(first)] = library_of(first)
        values, descriptors, casts = self._inputs_of(library, tensors)
        backend = self._backend
        device = common_device(self.inputs, descriptors, backend.device) if descriptors else None
        shapes = tuple([descriptor[1] for descriptor in descriptors])
        plan = self._plans.get(shapes) or self._plan(shapes)
        for place in casts:  # after the plan: it refuses a huge broadcast array, whose cast would fill the memory
            values[place] = value = library.cast(values[place], self.inputs[place].dtype)
            descriptors[place] = library.describe(value)
            tensors = [*tensors[:place], value, *tensors[place + 1 :]]
        outputs, aliases, mutated = self._outputs, self._aliases, self._mutated
        shared = None if aliases is None else aliases.of_inputs(library, plan, tensors, values, descriptors)
        targets = None if mutated is None else mutated.targets(library, tensors, values, descriptors)
        try:
            with backend.turn:
                stream = backend.begin(None if device is None else library.stream(device))
                try:
                    if views:
                        _bare(views.values())  # raises stale-view if a call of another thread came between
                    outputs.epoch.number += 1  # from here on the outputs of the last replay may be overwritten
                    if outputs.entry_epoch is not None:
                        outputs.entry_epoch.number += 1
                    results = self._run((library, device, stream), plan, tensors, values, descriptors)
                finally:
                    backend.end(stream)
        except CgbundleError as error:
            from ..tensors.input_errors import explained  # only for failed calls

            changed = set(self.spec.mutated_buffers) - {self.manifest.random}
            raise explained(error, self.inputs, descriptors, writes=bool(changed)) from None
        if library.name == "dlpack" and tensors and not self._views:
            results = [library.converted(value, first) for value in results]
        if mutated is not None and targets is not None:
            # on the CPU an output may lie in the memory of an input: a view of it needs the inputs until the next call
            self._kept_inputs = values if self._views else ()
            mutated.copy_back(targets, values)
        if shared is not None:
            for index, value in shared.items():
                results[index] = next((view for place, view in views.items() if tensors[place] is value), value)
        return results

    def _inputs_of(self, library: Library, tensors: Sequence[Any]) -> tuple[list[Any], list[Descriptor], list[int]]:
        """(inputs as the library's tensors, descriptors, positions of inputs to be cast)."""
        values: list[Any] = []
        descriptors: list[Descriptor] = []
        casts, take = [], library.take
        for tensor, spec in zip(tensors, self.inputs, strict=True):
            try:
                value, descriptor = take(tensor, spec.name)
            except CallError as error:
                from ..tensors.input_errors import unreadable  # only for failed calls

                raise unreadable(error, spec, tensor, library.name) from None
            if descriptor[2] != spec.dtype:
                self._check_cast(len(values), descriptor)
                casts.append(len(values))
            values.append(value)
            descriptors.append(descriptor)
        return values, descriptors, casts

    def _run(
        self, call: Call, plan: Plan, tensors: Sequence[Any], values: list[Any], descriptors: Sequence[Descriptor]
    ) -> list[Any]:
        library, device, _ = call
        outputs = self._outputs
        if plan.exact:
            addresses = []
            for index, (address, shape, _, strides, _) in enumerate(descriptors):
                if strides is not None or not self._row_major[index]:
                    address = self._laid_out(library, values, index, address, shape, strides)
                addresses.append(address)
            results = outputs.replay(call, plan.parts[0].program, addresses, None)
            self._remember(library, plan, tensors, descriptors)
            return results
        if len(plan.parts) == 1:
            (part,) = plan.parts
            kept, addresses = self._pad_inputs(library, device, part, values)
            return outputs.replay(call, part.program, addresses, part.outputs)
        whole = [library.empty(spec.dtype, shape, device) for spec, shape in zip(self.outputs, plan.shapes, strict=True)]
        for part in plan.parts:
            kept, addresses = self._pad_inputs(library, device, part, values)
            outputs.replay_into(whole, call, part, addresses)
            del kept  # the inputs must live until the end of the replay
        return outputs.guard(library, whole) if self._views else whole

    def _pad_inputs(self, library: Library, device: int | None, part: Part, values: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """The inputs of one replay, padded with zeros to the recorded shapes, and their addresses. The tensors must outlive the
        replay."""
        pieces: list[Any] = []
        addresses = []
        for index, (value, (slices, shape)) in enumerate(zip(values, part.inputs, strict=True)):
            piece = value[slices] if slices else value  # array[()] of NumPy is a number in other memory
            if tuple(piece.shape) != shape:
                padded = library.empty(self.inputs[index].dtype, shape, device)
                padded[tuple([slice(0, size) for size in piece.shape])] = piece
                piece = padded
            pieces.append(piece)
            address, sizes, _, strides, _ = library.describe(piece)
            addresses.append(self._laid_out(library, pieces, index, address, sizes, strides))
        return pieces, addresses

    def _laid_out(
        self, library: Library, values: list[Any], index: int, address: int, shape: Any, strides: Sequence[int] | None
    ) -> int:
        """The address of an input with the recorded order of axes. If the order differs, a copy replaces it in `values`."""
        order = self.inputs[index].order
        if is_dense(shape, library.strides(values[index]) if strides is None else strides, order):
            return address
        values[index] = library.ordered(values[index], order)
        return library.describe(values[index])[0]

    def buffers(self, int_key: tuple[int, ...]) -> list[Tensor]:
        """The static input buffers of a recorded key, in the order of the signature, dense, on the program's device.  A call with
        these tensors, or with tensors of another library over them (`torch.from_dlpack`), copies no inputs.

        On a GPU the buffers of all keys share memory: a call of another key overwrites them.  They are valid until the session is
        closed.  Raises key-missing.
        """
        from ..tensors.tensor import Tensor  # calls with NumPy arrays do not need it

        number = number_of_key(self.spec, int_key)
        addresses, owner = self._backend.buffers(self._first + number)
        program = self.spec.programs[number]
        rows = [program.values[index] for index in program.inputs]
        device = self._backend.device
        return [Tensor(at, row.dtype, row.shape, row.strides, owner, device) for at, row in zip(addresses, rows, strict=True)]

    def warmup(self, *int_keys: tuple[int, ...]) -> None:
        """`Program.warmup` for this entry: calls each of `int_keys` (default: all recorded ones).  Raises key-missing, and the
        errors of a call."""
        from .warmup import warm_up  # few programs ask for it

        for key in int_keys:
            number_of_key(self.spec, key)
        warm_up(self._session, self.manifest, [(self.spec, key, self.replay) for key in int_keys or self.int_keys])

    def watch(self, profile: Profile | None) -> None:
        """Reports later calls to a profile; None ends this."""
        self._known.clear()  # fast paths bypass the steps that a profile times
        self._flatten, self._build, self._flat = self._ends
        if profile is not None:
            self._flatten, self._build, self._flat = profile.begin(self._flatten), profile.end(self._build), -1

    @property
    def epoch(self) -> Epoch:
        """Counts this entry's calls if it has donated outputs (calls make views of these stale), else the session's replays."""
        return self._outputs.entry_epoch or self._outputs.epoch

    def forget(self) -> None:
        """Frees what calls have cached."""
        self._outputs.close()
        self._known.clear()
        self._kept_inputs = ()

    def __repr__(self) -> str:
        keys = ", ".join(map(str, self.int_keys[:6])) + (", ..." if len(self.int_keys) > 6 else "")
        return f"<cgbundle.Entry {self.name!r} of {self.manifest.name!r}, int_keys {keys}>"

    def _plan(self, shapes: tuple[Any, ...]) -> Plan:
        if len(self._plans) >= PLANS:
            self._plans.clear()
        return self._plans.setdefault(shapes, plan(self.spec, shapes, self._on_miss))

    def _remember(self, library: Library, plan: Plan, tensors: Sequence[Any], descriptors: Sequence[Descriptor]) -> None:
        """Adds the fast path for calls with inputs like these, if there is one."""
        program, outputs = plan.parts[0].program, self._outputs
        values = outputs.static(library, program)
        converted = library.name == "dlpack" and not self._views
        if values is None or not descriptors or descriptors[0][4] is None or self._aliases or self._mutated or converted:
            return
        if not all(self._row_major) or any(descriptor[3] is not None for descriptor in descriptors):
            return
        rows = [StaticOutput(*row) for row in zip(self.outputs, values, outputs.epochs, strict=True)]
        counts = [epoch for epoch in (outputs.epoch, outputs.entry_epoch) if epoch is not None]
        fast = replay(self._backend, library, self._first + program, rows, counts, views=self._views)
        if fast is not None:
            self._known.add(tensors, Known(library.guard(tensors), fast))

    def _check_cast(self, place: int, descriptor: Descriptor) -> None:
        """Raises input-dtype unless `cast=True` allows the cast."""
        from ..tensors.numbers import is_safe  # few calls need one

        spec, written = self.inputs[place], place in self.spec.mutated_inputs
        if written or not self._cast or not is_safe(descriptor[2], spec.dtype):
            from ..tensors.input_errors import wrong_dtype

            raise wrong_dtype(spec, descriptor[2], written=written)


def _flattener(spec: EntrySpec) -> Callable[..., Sequence[Any]]:
    """`structure.flattener` for the entry, created at its first use."""
    flatteners: list[Callable[..., Sequence[Any]]] = []

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        if not flatteners:
            from .structure import flattener  # many calls have only tensors by position

            flatteners.append(flattener(spec.call, spec.parameters))
        return flatteners[0](args, kwargs)

    return flatten


def _bare(tensors: Iterable[Any]) -> list[Any]:
    """Views replaced by their tensors. Raises stale-view."""
    return [tensor.tensor if type(tensor) is View else tensor for tensor in tensors]


def builder(tree: Tree) -> Callable[[Sequence[Any]], Any]:
    """A function tensors -> nested result. Classes of named tuples and records are created once, from their names."""
    ((kind, body),) = tree.items()
    if kind == "tensor":
        return itemgetter(body)
    if kind == "value":
        return lambda tensors: body
    parts = [builder(child) for _, child in children(tree)]
    if kind == "dict":
        keys = [key for key, _ in body]
        return lambda tensors: {key: part(tensors) for key, part in zip(keys, parts, strict=True)}
    if kind == "namedtuple":
        fields: Callable[..., Any] = namedtuple(body[0], body[1])  # type: ignore[misc]
        return lambda tensors: fields(*[part(tensors) for part in parts])
    if kind == "record":
        from .structure import record_class  # few results have any

        make = record_class(body[0], body[1], tuple(body[2])).of
        return lambda tensors: make([part(tensors) for part in parts])
    if kind == "list":
        return lambda tensors: [part(tensors) for part in parts]
    return lambda tensors: tuple([part(tensors) for part in parts])
