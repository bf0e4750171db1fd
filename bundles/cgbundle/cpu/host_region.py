"""Host regions: AOTInductor's shared objects, run through their C interface (torch/csrc/inductor/aoti_runtime/interface.h) with
constants in the runtime's memory, and the outputs of runs."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, Array, addressof, byref, c_bool, c_char_p, c_int32, c_int64, c_size_t, c_void_p, string_at
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any

from ..errors import CallError, MachineError, OutOfMemory
from ..format.archive import Archive
from ..format.schema import STATE, EntrySpec, Manifest, Program, Region, Value, Weight
from ..format.shapes import moving, span
from ..process import FORKS, make_calls, when_gone
from .host_weights import HostWeights
from .libtorch import LibTorch, load_shared_object, numbers
from .libtorch import built_with as version_of

CPU_DEVICE = 0  # c10::DeviceType::CPU
FORGETFUL = ((2, 13),)
"""Versions of torch whose containers leak a handle for each constant, 370 bytes each (MaybeOwningAtenTensorHandle,
torch/csrc/inductor/aoti_runtime/utils.h). Do not list a version that frees them."""

POINTER_BYTES, STRIDE_BYTES = ctypes.sizeof(c_void_p), ctypes.sizeof(c_int64)

CONSTANT_BYTES = 64  # AOTInductor rounds the bytes of constants up to a multiple (AOTI_CONST_ALIGNMENT)
ASSERTS = "an assertion of the model failed"  # in the message of every assertion of the model, after its line
API_CALL = " API call failed at "  # in an error's text if a function of torch's libraries failed; these have the cause
NO_MEMORY = ("DefaultCPUAllocator", "std::bad_alloc")  # out of memory: from torch's allocator, from C++
MODEL_PREFIX = "model."  # before names of the model's constants in the shared object
INSTANCES = 4  # maximum number of concurrent replays of one region, a few KB each; others wait


FUNCTIONS = tuple([
    f"AOTInductorModelContainer{name}"
    for name in (
        "CreateWithDevice", "Delete", "Run", "GetNumInputs", "GetNumOutputs", "GetNumConstants", "GetConstantName",
        "GetConstantOriginalFQN", "GetConstantDtype", "GetConstantDataSize", "UpdateUserManagedConstantBufferPairs",
    )
])  # fmt: skip
"""The functions of the C interface that the runtime calls."""


class _Pair(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("handle", c_void_p))


class Layout:
    """A tensor's dtype, shape and strides as the C interface takes them."""

    __slots__ = ("dtype", "rank", "shape", "shape_at", "strides", "strides_at")

    def __init__(self, dtype: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.dtype, self.rank = dtype, len(shape)
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(strides))(*strides)
        self.shape_at, self.strides_at = ctypes.addressof(self.shape), ctypes.addressof(self.strides)


def layout_of(row: Value | Weight, torch: LibTorch) -> Layout:
    """Raises library-refused if this torch does not have the dtype."""
    return Layout(torch.dtype(row.dtype), row.shape, row.strides)


def open_region(
    bundle: Archive, region: Region, weights: Sequence[Weight], placed: HostWeights | None, torch: LibTorch, state: int = 0,
    instances: int = INSTANCES, *, fixed: bool = False,
) -> HostRegion:  # fmt: skip
    """A host region with constants in place: in `placed` (None without constants), or in memory state at `state`; both must outlive
    it. `fixed`: the weights will not change. Raises library-refused."""
    opened = HostRegion(bundle.data(region.file), torch, region.file, instances, bundle.manifest.target.torch)
    try:
        opened.check_constants([(name, bundle.manifest.weights[index]) for name, index in region.constants])  # rows of the build
        constants = {}
        for name, index in region.constants:
            weight = weights[index]
            if weight.memory == STATE:
                address = state + weight.offset
            else:
                assert placed is not None
                address = placed.address(weight.tensor)
                if fixed:
                    opened.fix(address, span(weight), placed)
            constants[name] = (address, layout_of(weight, torch))
        opened.bind(constants)
    except BaseException:
        opened.close()
        raise
    return opened


class HostRegion:
    """A loaded shared object. Thread-safe: up to `instances` concurrent runs. Equal files share the code. Closed by `close` or with
    its last reference, in a forked process only by `close`. `built_with`: torch's version, "" if unknown. Raises image-invalid for
    a truncated file, library-refused if it cannot be loaded."""

    def __init__(self, data: bytes, torch: LibTorch, where: str, instances: int = INSTANCES, built_with: str = "") -> None:
        self._torch, self._where = torch, where
        self._library = load_shared_object(data, where, FUNCTIONS)
        self._forgets = numbers(built_with or version_of(self._library)) in FORGETFUL
        run = self._library.AOTInductorModelContainerRun
        run.argtypes = (c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p)
        self._run = torch.threaded(run)
        delete = self._library.AOTInductorModelContainerDelete
        delete.argtypes = (c_void_p,)
        release: Callable[[int], object] | None = getattr(self._library, "cgbundle_release", None)
        if release is not None:
            release.argtypes = (c_void_p,)  # type: ignore[attr-defined]
        self._owned, self._handles, self._fixed = handles_type(1)(), list[int | None](), list[int]()
        self._memory: list[object] = []
        self._pending = chain(
            map(delete, filter(None, self._owned)), map(release or id, self._fixed), map(torch.delete, filter(None, self._handles)),
            map(id, self._memory),
        )  # fmt: skip
        when_gone(self, self._pending, forked=False)
        create = self._library.AOTInductorModelContainerCreateWithDevice
        self._check(create(byref(self._owned), c_size_t(instances), b"cpu", None))
        self._container = c_void_p(self._owned[0])

    def fix(self, address: int, size: int, owner: object) -> None:
        """Declares that these weights do not change until `close`: code with its own matrix products caches packed weights by their
        address. The region keeps the `owner` of the memory until that cache is freed. Otherwise a later update could get the same
        address, and calls would use the old weights."""
        self._memory.append(owner)
        function = getattr(self._library, "cgbundle_fix", None)
        if function is not None:
            self._fixed.append(address)
            function(c_void_p(address), ctypes.c_int64(size))

    def constants(self) -> list[tuple[str, str]]:
        """(name in the shared object, name in the model) of every constant."""
        count, texts, library = c_size_t(), (c_char_p(), c_char_p()), self._library
        self._check(library.AOTInductorModelContainerGetNumConstants(self._container, byref(count)))
        getters = library.AOTInductorModelContainerGetConstantName, library.AOTInductorModelContainerGetConstantOriginalFQN
        names = []
        for index in range(count.value):
            for get, text in zip(getters, texts, strict=True):
                self._check(get(self._container, c_size_t(index), byref(text)))
            names.append(((texts[0].value or b"").decode(), (texts[1].value or b"").decode()))
        return names

    def check_constants(self, bound: Sequence[tuple[str, Weight]]) -> None:
        """Raises library-refused unless `bound` has each constant of the code once, with a weight of the same name and dtype that
        fits into its storage. A part of a larger tensor is smaller than its storage."""
        library, container, rows, names = self._library, self._container, dict(bound), self.constants()
        inner_names = {inner for inner, _ in names}
        if unlike := sorted(rows.keys() ^ inner_names):
            problem = "is bound, but the code has no such constant" if unlike[0] in rows else "of the code is not bound"
            raise self._refused(f"constant {unlike[0]!r} {problem}")
        if len(rows) != len(bound):
            bound_names = [inner for inner, _ in bound]
            raise self._refused(f"constant {next(name for name in rows if bound_names.count(name) > 1)!r} is bound twice")
        dtype, size = c_int32(), c_size_t()
        for index, (inner, model) in enumerate(names):
            row, name = rows[inner], model.removeprefix(MODEL_PREFIX)
            if row.name != name:
                raise self._refused(f"constant {inner!r} is weight {name!r} in the code, but {row.name!r} in the manifest")
            self._check(library.AOTInductorModelContainerGetConstantDtype(container, c_size_t(index), byref(dtype)))
            self._check(library.AOTInductorModelContainerGetConstantDataSize(container, c_size_t(index), byref(size)))
            rounded = -(-span(row) // CONSTANT_BYTES) * CONSTANT_BYTES
            if dtype.value != self._torch.dtype(row.dtype) or rounded > size.value:
                text = f"constant {inner!r} has another dtype or size in the code ({size.value} bytes)"
                raise self._refused(f"{text} than in the manifest ({row.dtype} {list(row.shape)})")

    def _refused(self, text: str, hint: str = "build the bundle again") -> MachineError:
        return MachineError("library-refused", f"{self._where}: {text}", hint)

    def bind(self, constants: Mapping[str, tuple[int, Layout]]) -> None:
        """Sets the constants by their names in the shared object: (address, layout) of memory that the runtime keeps."""
        pairs = (_Pair * len(constants))()
        for pair, (name, (address, layout)) in zip(pairs, constants.items(), strict=True):
            handle = c_void_p()
            if self._torch.create(
                address, layout.rank, layout.shape_at, layout.strides_at, 0, layout.dtype, CPU_DEVICE, 0, byref(handle)
            ):
                raise self._refused("torch refused a constant", "")
            self._handles.append(handle.value)
            pair.name, pair.handle = name.encode(), handle.value
        update = self._library.AOTInductorModelContainerUpdateUserManagedConstantBufferPairs
        self._check(update(self._container, pairs, c_size_t(len(constants)), c_bool(False), c_bool(True)))
        if not self._forgets:
            return
        entries, count = POINTER(_Pair)(), c_size_t()  # the container's handles of these constants
        extract = getattr(self._library, "AOTInductorModelContainerExtractConstantsMapEntries", None)
        if extract is None:  # code of another version than the bundle says
            raise self._refused("was not built with the torch of the manifest")
        self._check(extract(self._container, byref(entries), byref(count), c_bool(False)))
        self._handles += [entries[index].handle for index in range(count.value)]

    def check_counts(self, inputs: int, outputs: int) -> None:
        """Raises library-refused for other numbers of inputs and outputs, with which `run` would crash."""
        for kind, count in (("Inputs", inputs), ("Outputs", outputs)):
            number = c_size_t()
            self._check(self._library[f"AOTInductorModelContainerGetNum{kind}"](self._container, byref(number)))
            if number.value != count:
                raise self._refused(f"expected {count} {kind.lower()}, got {number.value}", "")

    def run(self, addresses: Sequence[int], layouts: Sequence[Layout], outputs: ctypes.Array[c_void_p]) -> None:
        """Runs on CPU memory. Writes handles of output tensors to `outputs`, for the caller to delete. Raises assertion-failed,
        operation-refused, out-of-memory."""
        inputs = handles_type(len(addresses))()
        place = addressof(inputs)
        for address, layout in zip(addresses, layouts, strict=True):
            if self._torch.create(address, layout.rank, layout.shape_at, layout.strides_at, 0, layout.dtype, CPU_DEVICE, 0, place):
                raise self._refused("torch refused an input tensor", "")
            place += POINTER_BYTES
        FORKS.threads = True
        if self._run(self._container, inputs, len(addresses), outputs, len(outputs), None, None):
            message = self._last_error()  # caused by input values, or by missing memory
            if ASSERTS in message:
                raise CallError("assertion-failed", message.removeprefix("Expected "))
            if any(text in message for text in NO_MEMORY):
                hint = "free memory of this machine, or call smaller sizes"
                raise OutOfMemory("out-of-memory", f"{self._where}: {message}", hint)
            raise CallError("operation-refused", f"{self._where}: {message or 'the shared object failed'}")

    def close(self) -> None:
        """Frees the container and the constants' handles. The shared object stays mapped (dlclose of C++ code is not safe)."""
        make_calls(self._pending)

    def _check(self, code: int) -> None:
        if code:
            raise self._refused(self._last_error() or "the shared object failed", "")

    def _last_error(self) -> str:
        text = c_char_p()
        last = getattr(self._library, "AOTInductorGetLastError", None)  # from torch 2.13, else from silent_errors.h
        if last is not None:
            last.argtypes, last.restype = (POINTER(c_char_p),), c_int32
            last(byref(text))
        message = (text.value or b"").decode(errors="replace").strip().removeprefix("Error: ")
        if API_CALL in message:
            message = self._torch.last_exception().strip() or f"{message.partition(API_CALL)[0]} failed"
        return message.splitlines()[0] if message else ""


# --- outputs of runs ----------------------------------------------------------------------------------------------------

Found = tuple[int, tuple[int, ...], tuple[int, ...]]
"""torch's number of a dtype, shape, strides in elements: the result of `LibTorch.layout`."""


@lru_cache(maxsize=256)
def handles_type(count: int) -> type[Array[c_void_p]]:
    return c_void_p * count


ALL: Any = itemgetter(slice(None))  # a ctypes array as a list; iteration is slow


class RegionOutputs:
    """The output tensors of one replay, in torch's memory until `release` or the last reference. The replay writes `handles`. An
    interrupt may come at any point: C functions free each tensor once. `free` keeps released objects for reuse, because creation
    takes microseconds."""

    __slots__ = ("__weakref__", "_free", "_pending", "_torch", "addresses", "handles")

    device: int | None = None
    static = False

    def __init__(self, torch: LibTorch, count: int, free: deque[RegionOutputs] | None = None) -> None:
        self._torch, self._free, self.handles = torch, free, handles_type(count)()
        self._pending: list[int | None] = []  # handles to be freed, after a 0 that ends them
        self.addresses: Sequence[int] = ()
        rest = chain.from_iterable(map(ALL, (self.handles, self._pending)))
        when_gone(self, map(torch.delete, filter(None, rest)))

    def transfer_ownership(self, index: int) -> RegionOutputs:
        """Moves one tensor to a new object."""
        kept = RegionOutputs(self._torch, 1)
        kept.handles[0], self.handles[index] = self.handles[index], None
        return kept

    def release(self) -> None:
        pending, handles = self._pending, self.handles
        pending[:], handles[:] = [0, *handles[:]], [None] * len(handles)  # no function call, so no interrupt comes between
        make_calls(map(self._torch.delete, filter(None, iter(pending.pop, 0))))
        if self._free is not None:
            self._free.append(self)


def check_layout(layout: Found, dtype: int, row: Value, where: str) -> None:
    """Raises library-refused unless the tensor has the layout of `row`, whose dtype is torch's number `dtype`. Strides of axes of
    one element, and of empty tensors, do not count."""
    number, shape, strides = layout
    if number != dtype or shape != row.shape or moving(shape, strides) != moving(shape, row.strides):
        expected = f"{row.dtype} {list(row.shape)} with strides {list(row.strides)}"
        got = f"{list(shape)} with strides {list(strides)}{'' if number == dtype else ' and another dtype'}"
        raise MachineError("library-refused", f"{where}: expected {expected}, got {got}", "build the bundle again")


class OutputLayouts:
    """Checks layouts of a CPU program's outputs. Dtypes and shapes depend only on those of the inputs: checked at the first replay.
    Strides may depend on values, as for a column of a tensor whose width is a sum: checked at every replay. Aliases are skipped,
    because the code returns copies."""

    __slots__ = ("_handed", "_rows", "_strides", "_torch", "_where")

    def __init__(self, torch: LibTorch, manifest: Manifest, entry: EntrySpec, program: Program) -> None:
        shared = {alias.output for alias in entry.aliases}
        self._torch, self._where = torch, manifest.regions[program.steps[0].region].file
        self._rows = [
            (place, torch.dtype(value.dtype), value, f"output {entry.outputs[place].name!r}")
            for place, value in enumerate([program.values[index] for index in program.outputs])
            if place not in shared
        ]
        self._handed = c_void_p * (2 * len(program.outputs))
        self._strides: list[tuple[int, int, bytes]] | None = None

    def addresses(self, handles: Array[c_void_p]) -> list[int]:
        """The addresses of one replay's tensors. Raises library-refused with the name of an output."""
        torch, words = self._torch, self._handed()
        place = addressof(words)
        for handle in handles:
            torch.data_pointer(handle, place)
            torch.strides(handle, place + POINTER_BYTES)
            place += 2 * POINTER_BYTES
        if self._strides is None:
            self._check(handles)
            sizes = [(2 * place + 1, len(row.shape) * STRIDE_BYTES) for place, _, row, _ in self._rows if row.shape]
            self._strides = [(place, size, string_at(words[place] or 0, size)) for place, size in sizes]
        else:
            for place, size, seen in self._strides:
                if string_at(words[place] or 0, size) != seen:
                    self._check(handles)
        return [address or 0 for address in words[::2]]

    def _check(self, handles: Array[c_void_p]) -> None:
        for place, dtype, row, name in self._rows:
            check_layout(self._torch.layout(handles[place] or 0), dtype, row, f"{self._where}: {name}")
