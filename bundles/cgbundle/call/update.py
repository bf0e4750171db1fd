"""New weights for a loaded program, from safetensors files, another bundle, or tensors. Files are read, never mapped: a write to a
mapped file would change weights in use, truncation would end the process."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

from ..errors import BundleError, CallError
from ..format import limits
from ..format.archive import Archive
from ..format.file_names import MANIFEST, WEIGHTS
from ..format.safetensors import read_header
from ..format.schema import DTYPES, FrozenWeight, Manifest, Weight
from ..format.shapes import dense, is_dense, memory_order
from ..process import when_gone
from ..tensors.library import Library, array_type, library_of
from ..tensors.tensor import DLPack, Tensor, empty
from ..validate.manifest import BAKED, CONSTANT, FOLDED

INDEX = ".index.json"  # suffix of the index of a sharded checkpoint, as on the Hugging Face Hub
PLAIN = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}  # by bytes of an element, a dtype that every library has


class OpenFile:
    """A file of weights, open until it is collected or the interpreter ends."""

    __slots__ = ("__weakref__", "_changed", "descriptor", "path")

    def __init__(self, path: str) -> None:
        self.path, opened = path, list[int]()
        when_gone(self, map(os.close, opened))
        try:
            opened.extend(map(os.open, (path,), (os.O_RDONLY | os.O_CLOEXEC,)))
        except OSError as error:
            raise invalid(f"{path}: {error.strerror}", PATHS) from None
        self.descriptor = opened[0]
        self._changed = os.fstat(self.descriptor).st_mtime_ns

    def read(self, begin: int, size: int, target: int) -> None:
        view, done = memoryview((ctypes.c_char * size).from_address(target)).cast("B"), 0
        while done < size:
            try:
                step = os.preadv(self.descriptor, [view[done:]], begin + done)
            except OSError as error:
                raise invalid(f"{self.path}: {error.strerror}", UNSOUND) from None
            if not step:
                raise invalid(f"{self.path}: ends at byte {begin + done}", UNSOUND)
            done += step

    def check_unchanged(self) -> None:
        """Raises update-invalid if the file was written to since it was opened."""
        if os.fstat(self.descriptor).st_mtime_ns != self._changed:
            raise invalid(f"{self.path}: was written to while it was read", "write a file under another name, then rename it")


class Contents(NamedTuple):
    """A new weight: row-major at byte `begin` of `file`, or `value`, a tensor of `library` at `address` on the CPU or a CUDA
    device. `strides` in elements, None for row-major."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    file: OpenFile | None = None
    begin: int = 0
    value: Any = None
    library: Library | None = None
    address: int = 0
    device: int | None = None

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype]

    def laid_out(self, row: Weight) -> Contents:
        """The tensor in the weight's layout, dense; contents of files are read."""
        order, library, value = memory_order(row.shape, row.strides), self.library, self.value
        if is_dense(self.shape, dense(self.shape) if self.strides is None else self.strides, order):
            return self
        if self.file is not None:
            memory = empty("uint8", (self.bytes,))
            self.file.read(self.begin, self.bytes, memory.address)
            library, value = DLPack(), Tensor(memory.address, PLAIN[DTYPES[self.dtype]], self.shape, self.strides, memory)
            if numpy := sys.modules.get("numpy"):  # NumPy copies faster
                from ..tensors.numpy_arrays import Numpy

                library = Numpy(numpy)
                value = library.wrap(value.address, value.dtype, value.shape, value.strides, value)
        assert library is not None
        return _described(library, library.ordered(value, order))._replace(dtype=self.dtype)

    def copy_to(self, address: int, row: Weight) -> None:
        tensor = self.laid_out(row)
        if tensor.file is not None:
            tensor.file.read(tensor.begin, tensor.bytes, address)
        else:
            ctypes.memmove(address, tensor.address, tensor.bytes)

    def near(self) -> Contents:
        """The tensor on the CPU. Raises update-invalid for GPU tensors of an unknown library."""
        if self.device is None:
            return self
        fetch = getattr(self.value, {"torch": "cpu", "cupy": "get"}.get(self.library.name if self.library else "", ""), None)
        if fetch is None:
            raise invalid("a tensor of a GPU whose library cannot copy it to the CPU", "give it on the CPU")
        value = fetch()
        return _described(library_of(value), value)

    def digest(self, row: Weight) -> str:
        memory = array_type(self.bytes)()
        self.near().copy_to(ctypes.addressof(memory), row)
        return sha256(memoryview(memory)[: self.bytes]).hexdigest()


PICKLES = (".pt", ".pth", ".bin", ".ckpt")  # suffixes of files that torch.save writes
PICKLED = "give update() what torch.load(path) returns, if that is a state_dict: a mapping of names to tensors"

PATHS = "give the path of a .safetensors file, of an .index.json, of a folder with one of them, or of a bundle; nothing was changed"

UNSOUND = "save the checkpoint again, or copy it whole; nothing was changed"

NamedContents = Mapping[str, Contents]  # by the names of weights


def invalid(message: str, hint: str = "") -> CallError:
    return CallError("update-invalid", message, hint)


def contents_of(weights: object) -> NamedContents:
    """The contents at a path, or of a mapping of names to tensors. Raises update-invalid."""
    if isinstance(weights, Mapping):
        return {name: _of_tensor(name, value) for name, value in weights.items()}
    if not isinstance(weights, str | os.PathLike):
        raise invalid(f"expected a path or a mapping of names to tensors, got {type(weights).__name__}")
    path = os.fsdecode(weights)
    folder, name = (path, WEIGHTS) if os.path.isdir(path) else os.path.split(path)
    if name == WEIGHTS and os.path.exists(os.path.join(folder, MANIFEST)):
        return _of_bundle(folder or ".")
    if not os.path.isdir(path):
        return _of_index(path) if name.endswith(INDEX) else _of_file(path)
    names = sorted(os.listdir(path))  # a checkpoint as on the Hub: an index and its files, or one file
    files = [name for name in names if name.endswith(INDEX)] or [name for name in names if name.endswith(".safetensors")]
    if len(files) != 1:
        text = f"{path}: {len(files)} files that could be the weights"
        raise invalid(text, f"name a .safetensors file, or one that ends in {INDEX}")
    return contents_of(os.path.join(path, files[0]))


def _of_tensor(name: object, value: Any) -> Contents:
    if not isinstance(name, str):
        raise invalid(f"expected names of weights, got {name!r}")
    if hasattr(value, "__tensor_flatten__"):  # torch's protocol for tensors that hold others
        raise invalid(f"weight {name!r}: {type(value).__name__} is no plain tensor", "give the tensors inside of it by their names")
    library = library_of(value)
    try:
        value, _ = library.take(value, name)
    except CallError as error:
        raise invalid(str(error).replace("input", "weight", 1)) from None
    return _described(library, value)


def _described(library: Library, value: Any) -> Contents:
    address, shape, dtype, strides, device = library.describe(value)
    steps = None if strides is None else tuple(strides)
    return Contents(dtype, tuple(shape), steps, value=value, library=library, address=address, device=device)


def _of_file(path: str) -> NamedContents:
    file = OpenFile(path)
    with open(file.descriptor, "rb", closefd=False) as opened:
        try:
            entries = read_header(opened, path)
        except BundleError as error:
            if path.endswith(PICKLES):
                raise invalid(f"{path}: no safetensors file, but one of torch.save", PICKLED) from None
            raise invalid(str(error), UNSOUND) from None
        except OSError as error:
            raise invalid(f"{path}: {error.strerror}", PATHS) from None
    return {name: Contents(row.dtype, row.shape, None, file, row.begin) for name, row in entries.items()}


def _of_index(path: str) -> NamedContents:
    """The files of an index: {"weight_map": {name of a tensor: name of its file}}."""
    try:
        with open(path, "rb") as file:
            plain = limits.parse(file.read(limits.JSON_BYTES + 1))
    except OSError as error:
        raise invalid(f"{path}: {error.strerror}", PATHS) from None
    except ValueError as error:
        raise invalid(f"{path}: {error}", UNSOUND) from None
    places = plain.get("weight_map") if isinstance(plain, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise invalid(f"{path}: has no weight_map of names of tensors to names of files", UNSOUND)
    odd = next((name for name in places.values() if os.path.basename(name) != name or name in ("", ".", "..")), None)
    if odd is not None:
        raise invalid(f"{path}: {odd!r} is no name of a file beside it", UNSOUND)
    files = {name: _of_file(os.path.join(os.path.dirname(path), name)) for name in sorted(set(places.values()))}
    for name, file_name in places.items():
        if name not in files[file_name]:
            raise invalid(f"{path}: {file_name} has no tensor {name!r}", UNSOUND)
    return {name: files[file_name][name] for name, file_name in places.items()}


def _of_bundle(path: str) -> NamedContents:
    """The weights of another bundle, in the layout of its manifest; without state and constants. Raises as reading its manifest
    does."""
    manifest = Archive(path).manifest
    stored = _of_file(os.path.join(path, WEIGHTS))
    left_out = {row.weight for row in manifest.frozen if row.reason not in (FOLDED, BAKED)}
    rows = [row for index, row in enumerate(manifest.weights) if index not in left_out and row.memory != "state"]
    return {row.name: stored[row.tensor]._replace(shape=row.shape, strides=row.strides) for row in rows if row.tensor in stored}


# --- an update, checked against the manifest before anything changes ----------------------------------------------------

FROZEN = {
    CONSTANT: ("is a constant of the model, and not in its state_dict", "leave it out"),
    FOLDED: ("was folded: compiled code holds values that were computed from it", "build the bundle again with the new weights"),
    BAKED: ("was read by Python at {where} while the bundle was built, and the build depends on this value",
        "build the bundle again with the new weights"),
    "state": ("is state, which calls change", "leave it out; `program.state` writes state"),
}  # fmt: skip
"""Why weights cannot be updated, and what to do."""


def update(manifest: Manifest, programs: Sequence[Sequence[Any]], weights: object, *, partial: bool) -> None:
    """`Program.update` of one program or of copies on several devices: for each the `Backend`s of its sessions, the loaded
    program's first. Weights are copied to every device before any device changes."""
    _check_names(weights if isinstance(weights, Mapping) else (), manifest)  # first: values of unknown names may be no tensors
    contents = contents_of(weights)
    chosen = [checked(manifest, contents, backends[0].device, partial=partial) for backends in programs]
    files = list({id(tensor.file): tensor.file for tensor in contents.values() if tensor.file is not None}.values())

    def change(number: int) -> None:
        if number < len(programs):
            backends = programs[number]
            backends[0].update(chosen[number], backends, files, lambda: change(number + 1))

    change(0)


def checked(manifest: Manifest, named: NamedContents, device: int | None, *, partial: bool) -> dict[int, Contents]:
    """The new contents by position of the weight; of tied weights, the first one's. `device`: the program's. Raises update-invalid,
    update-refused."""
    _check_names(named, manifest)
    rows, fixed = {row.name: row for row in manifest.weights}, _fixed(manifest)
    first: dict[str, int] = {}
    for index, row in enumerate(manifest.weights):
        first.setdefault(row.tensor, index)
    chosen: dict[int, tuple[str, Contents]] = {}
    for name, contents in named.items():
        row = rows[name]
        _check_kind(name, contents, row, device)
        if row.tensor not in fixed:
            other_name, other = chosen.setdefault(first[row.tensor], (name, contents))
            places = [(value.file, value.begin, value.address, value.strides) for value in (contents, other)]
            if other is not contents and places[0] != places[1] and contents.digest(row) != other.digest(row):
                raise invalid(f"weights {other_name!r} and {name!r} are one tensor in the model, and differ")
    if not partial:
        there = {manifest.weights[index].tensor for index in chosen}
        missing = [row for row in manifest.weights if row.tensor not in there and row.tensor not in fixed]
        if names := list({row.tensor: row.name for row in reversed(missing)}.values())[::-1]:
            text = f"weight {names[0]!r} is missing{f', and {len(names) - 1} more' if len(names) > 1 else ''}"
            raise invalid(text, "give all weights, or say partial=True to replace those that are given")
    for name, contents in named.items():  # the slowest check is the last
        kept = fixed.get(rows[name].tensor)
        if kept is not None and contents.digest(rows[name]) != kept.sha256:
            reason, hint = FROZEN[kept.reason]
            text = f"weight {name!r} {reason.format(where=kept.where)}, and the new value differs"
            raise CallError("update-refused", text, hint)
    return {index: contents for index, (_, contents) in chosen.items()}


def updatable(manifest: Manifest) -> tuple[list[str], dict[str, str]]:
    """The names of weights that an update changes, and the reasons of the others."""
    fixed = _fixed(manifest)
    names = [row.name for row in manifest.weights if row.tensor not in fixed]
    return names, {row.name: fixed[row.tensor].reason for row in manifest.weights if row.tensor in fixed}


def _fixed(manifest: Manifest) -> dict[str, FrozenWeight]:
    known = {manifest.weights[row.weight].tensor: row for row in manifest.frozen}
    state = [(index, row.tensor) for index, row in enumerate(manifest.weights) if row.memory == "state"]
    return {tensor: FrozenWeight(weight=index, reason="state", sha256="") for index, tensor in state} | known


def _check_names(listed: Iterable[object], manifest: Manifest) -> None:
    known = dict.fromkeys(row.name for row in manifest.weights)
    names = [name for name in listed if isinstance(name, str)]
    name = next((name for name in names if name not in known), None)
    if name is None:
        return
    from difflib import get_close_matches  # only errors need it

    layer = name.partition(PACKED)[0] if PACKED in name.split(".") else name[: name.rfind(".") + 1]
    packed = [weight for weight in known if weight.startswith(f"{layer}{PACKED}.")]
    near = packed or get_close_matches(name, known, 1, 0.5)
    shown = ", ".join(map(repr, near or list(known)[:3])) + ("" if near else " ...")
    hint = UNPACK if packed else _prefix(name, names, known)
    raise invalid(f"the program has no weight {name!r}; it has {shown}", hint)


PACKED = "_packed_params"
"""The submodule in which a quantized layer of torch.ao packs its weights. A bundle has them as plain tensors under its name."""

UNPACK = (
    "a state_dict has a quantized layer's weights packed: give the layer's weight().int_repr(), weight().q_scale() and bias() "
    "under these names"
)


def _prefix(name: str, names: Sequence[str], known: Collection[str]) -> str:
    """A hint if all names have an extra prefix, as with DistributedDataParallel, or lack one; else ""."""
    parts = name.split(".")
    for prefix in [".".join(parts[:count]) + "." for count in range(1, len(parts))]:
        if all(weight.startswith(prefix) for weight in names) and name.removeprefix(prefix) in known:
            return f"remove the prefix {prefix!r} from the names"
    for prefix in sorted({weight.removesuffix(name) for weight in known if weight.endswith(f".{name}")}):
        if all(prefix + weight in known for weight in names):
            return f"put the prefix {prefix!r} before the names"
    return ""


def _check_kind(name: str, contents: Contents, row: Weight, device: int | None) -> None:
    problem = ""
    if contents.dtype != row.dtype:
        problem = f"expected {row.dtype}, got {contents.dtype}"
    elif contents.shape != row.shape:
        problem = f"expected shape {list(row.shape)}, got {list(contents.shape)}"
    elif contents.device not in (None, device):
        here = "the CPU" if device is None else f"the CPU or CUDA device {device}"
        problem = f"expected a tensor on {here}, got one on device {contents.device}"
    if problem:
        raise invalid(f"weight {name!r}: {problem}")
