"""New weights for a loaded program: in safetensors files, in another bundle, or as tensors.

Files are read, never mapped: a mapped file that is written to or cut would change, or end, a process that serves.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

from ..errors import BundleError, CallError
from ..format import json_text, limits
from ..format.archive import Archive
from ..format.file_names import MANIFEST, WEIGHTS
from ..format.open_files import when_gone
from ..format.safetensors import read_header
from ..format.schema import DTYPES, FrozenWeight, Manifest, Weight
from ..format.spans import dense, is_dense, memory_order
from ..tensors.dlpack import DLPack
from ..tensors.library import Library, array_type, library_of
from ..tensors.tensor import Tensor, empty
from ..validate.memories import BAKED, CONSTANT, FOLDED

INDEX = ".index.json"
"""How the name of a file ends that lists the files of a sharded checkpoint, as the Hugging Face Hub has it."""

PLAIN = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
"""A dtype that every library has, by its bytes."""


class OpenFile:
    """A file of weights, open until it is forgotten or the interpreter ends."""

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
        """Reads bytes of the file to an address.  Raises update-invalid where they are not there."""
        view = memoryview((ctypes.c_char * size).from_address(target)).cast("B")
        done = 0
        while done < size:
            try:
                step = os.preadv(self.descriptor, [view[done:]], begin + done)
            except OSError as error:
                raise invalid(f"{self.path}: {error.strerror}", UNSOUND) from None
            if not step:
                raise invalid(f"{self.path}: ends at byte {begin + done}", UNSOUND)
            done += step

    def check_unchanged(self) -> None:
        """Raises update-invalid where the file was written to since it was opened."""
        if os.fstat(self.descriptor).st_mtime_ns != self._changed:
            raise invalid(f"{self.path}: was written to while it was read", "write a file under another name, then rename it")


class Contents(NamedTuple):
    """A tensor to be a weight: row-major from byte `begin` of `file` on, or `value`, a tensor of `library` at `address` of the CPU,
    or of CUDA device `device`.  `strides` in elements, None where it is row-major."""

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

    def lies_as(self, row: Weight) -> bool:
        """Whether its bytes lie in the order that those of the weight have."""
        strides = dense(self.shape) if self.strides is None else self.strides
        return is_dense(self.shape, strides, memory_order(row.shape, row.strides))

    def laid_out(self, row: Weight) -> Contents:
        """The same tensor with its axes in memory as the weight's are, without gaps; of a file read into memory of this process."""
        if self.lies_as(row):
            return self
        if self.file is not None:
            memory = empty("uint8", (self.bytes,))
            self.file.read(self.begin, self.bytes, memory.address)
            held = Tensor(memory.address, PLAIN[DTYPES[self.dtype]], self.shape, self.strides, memory)
            return _described(*_common(held))._replace(dtype=self.dtype).laid_out(row)
        library = self.library
        assert library is not None
        return _described(library, library.ordered(self.value, memory_order(row.shape, row.strides)))._replace(dtype=self.dtype)

    def copy_to(self, address: int, row: Weight) -> None:
        """Copies it, which lies on the CPU, to an address, its axes in the order that those of the weight have there."""
        tensor = self.laid_out(row)
        if tensor.file is not None:
            tensor.file.read(tensor.begin, tensor.bytes, address)
        else:
            ctypes.memmove(address, tensor.address, tensor.bytes)

    def near(self) -> Contents:
        """The same tensor on the CPU.  Raises update-invalid for one of a GPU whose library is not known."""
        if self.device is None:
            return self
        fetch = getattr(self.value, {"torch": "cpu", "cupy": "get"}.get(self.library.name if self.library else "", ""), None)
        if fetch is None:
            raise invalid("a tensor of a GPU whose library cannot copy it to the CPU", "give it on the CPU")
        value = fetch()
        return _described(library_of(value), value)

    def digest(self, row: Weight) -> str:
        """The SHA-256 of its bytes, in the order that those of the weight have."""
        memory = array_type(self.bytes)()
        self.near().copy_to(ctypes.addressof(memory), row)
        return sha256(memoryview(memory)[: self.bytes]).hexdigest()


PICKLES = (".pt", ".pth", ".bin", ".ckpt")
"""Endings of files that torch.save writes."""

PICKLED = "give update() what torch.load(path) returns, if that is a state_dict: a mapping of names to tensors"

PATHS = "give the path of a .safetensors file, of an .index.json, of a folder with one of them, or of a bundle; nothing was changed"

UNSOUND = "save the checkpoint again, or copy it whole; nothing was changed"

NamedContents = Mapping[str, Contents]
"""By the names of weights."""


def invalid(message: str, hint: str = "") -> CallError:
    """The error of what cannot be the weights of a program."""
    return CallError("update-invalid", message, hint)


def contents_of(weights: object) -> NamedContents:
    """What `Program.update` is given: a path, or a mapping of names to tensors.  Raises update-invalid."""
    if isinstance(weights, Mapping):
        return {name: _of_tensor(name, value) for name, value in weights.items()}
    if not isinstance(weights, str | os.PathLike):
        raise invalid(f"expected a path or a mapping of names to tensors, got {type(weights).__name__}")
    path = os.fspath(weights)
    if not isinstance(path, str):
        path = os.fsdecode(path)
    if os.path.isdir(path):
        return _of_bundle(path) if os.path.exists(os.path.join(path, MANIFEST)) else _of_folder(path)
    folder, name = os.path.split(path)
    if name == WEIGHTS and os.path.exists(os.path.join(folder, MANIFEST)):
        return _of_bundle(folder or ".")
    return _of_index(path) if name.endswith(INDEX) else _of_file(path)


def files_of(contents: Iterable[Contents]) -> list[OpenFile]:
    """The files that contents lie in, each once."""
    return list({id(tensor.file): tensor.file for tensor in contents if tensor.file is not None}.values())


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


def _common(held: Tensor) -> tuple[Library, Any]:
    """A tensor of ours as one of a library that is fast at copying, where there is one."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return DLPack(), held
    from ..tensors.numpy_arrays import Numpy

    library = Numpy(numpy)
    return library, library.wrap(held.address, held.dtype, held.shape, held.strides, held)


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


def _of_folder(path: str) -> NamedContents:
    """A checkpoint as the Hub has it: an index and its files, or one file."""
    names = sorted(os.listdir(path))
    files = [name for name in names if name.endswith(INDEX)] or [name for name in names if name.endswith(".safetensors")]
    if len(files) != 1:
        text = f"{path}: {len(files)} files that could be the weights"
        raise invalid(text, f"name a .safetensors file, or one that ends in {INDEX}")
    return contents_of(os.path.join(path, files[0]))


def _of_index(path: str) -> NamedContents:
    """The files of an index beside it: {"weight_map": {name of a tensor: name of its file}}."""
    try:
        with open(path, "rb") as file:
            plain = json_text.parse(file.read(limits.JSON_BYTES + 1))
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
    """The weights of another bundle, which lie in its file with their axes in memory order; state and constants are left out.
    Raises what reading its manifest does."""
    manifest = Archive(path).manifest
    stored = _of_file(os.path.join(path, WEIGHTS))
    left_out = {row.weight for row in manifest.frozen if row.reason not in (FOLDED, BAKED)}
    rows = [row for index, row in enumerate(manifest.weights) if index not in left_out and row.memory != "state"]
    return {row.name: stored[row.tensor]._replace(shape=row.shape, strides=row.strides) for row in rows if row.tensor in stored}


# --- an update, checked against the manifest before anything changes ----------------------------------------------------

REASONS = {
    CONSTANT: "is a constant of the model, and not in its state_dict",
    FOLDED: "was folded: compiled code holds values that were computed from it",
    BAKED: "was read by Python at {where} while the bundle was built, which went on by its value",
    "state": "is state, which calls change",
}

HINTS = {
    CONSTANT: "leave it out",
    FOLDED: "build the bundle again with the new weights",
    BAKED: "build the bundle again with the new weights",
    "state": "leave it out; `program.state` writes state",
}


def update(manifest: Manifest, programs: Sequence[Sequence[Any]], weights: object, *, partial: bool) -> None:
    """`Program.update` of one program, or of copies on several devices: of each the `Backend`s of its sessions, the
    loaded one's first.

    The weights are brought to every device before they change on any.
    """
    _check_names(weights if isinstance(weights, Mapping) else (), manifest)  # before the values: what stands under them is none
    contents = contents_of(weights)
    chosen = [checked(manifest, contents, backends[0].device, partial=partial) for backends in programs]
    files = files_of(contents.values())

    def change(number: int) -> None:
        if number < len(programs):
            backends = programs[number]
            backends[0].update(chosen[number], backends, files, lambda: change(number + 1))

    change(0)


def checked(manifest: Manifest, named: NamedContents, device: int | None, *, partial: bool) -> dict[int, Contents]:
    """The new contents by the positions of weights, of tied ones by the first one's.  `device`: the program's.

    Raises update-invalid and update-refused, naming the weight.
    """
    _check_names(named, manifest)
    rows = {row.name: (index, row) for index, row in enumerate(manifest.weights)}
    fixed = _fixed(manifest)
    first: dict[str, int] = {}
    for index, row in enumerate(manifest.weights):
        first.setdefault(row.tensor, index)
    chosen: dict[int, tuple[str, Contents]] = {}
    kept: list[tuple[str, Contents, Weight, FrozenWeight]] = []
    for name, contents in named.items():
        index, row = rows[name]
        _check_kind(name, contents, row, device)
        if row.tensor in fixed:
            kept.append((name, contents, row, fixed[row.tensor]))
        else:
            _check_tied(name, contents, row, chosen.setdefault(first[row.tensor], (name, contents)))
    if not partial:
        _check_complete(manifest, fixed, chosen)
    for arguments in kept:  # the dearest check is the last
        _check_kept(*arguments)
    return {index: contents for index, (_, contents) in chosen.items()}


def updatable(manifest: Manifest) -> tuple[list[str], dict[str, str]]:
    """The names of the weights that an update changes, and of the others with the reasons, as `FrozenWeight` has them."""
    fixed = _fixed(manifest)
    names = [row.name for row in manifest.weights if row.tensor not in fixed]
    return names, {row.name: fixed[row.tensor].reason for row in manifest.weights if row.tensor in fixed}


def _fixed(manifest: Manifest) -> dict[str, FrozenWeight]:
    """By the tensor."""
    known = {manifest.weights[row.weight].tensor: row for row in manifest.frozen}
    state = [(index, row.tensor) for index, row in enumerate(manifest.weights) if row.memory == "state"]
    return {tensor: FrozenWeight(weight=index, reason="state", sha256="") for index, tensor in state} | known


def _check_names(listed: Iterable[object], manifest: Manifest) -> None:
    """Raises update-invalid for names that are none of the bundle's."""
    known = dict.fromkeys(row.name for row in manifest.weights)
    names = [name for name in listed if isinstance(name, str)]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise _unknown(unknown, names, known)


PACKED = "_packed_params"
"""The module that a quantized layer of torch.ao keeps its weights in, packed: a bundle has them as plain tensors of that module."""

UNPACK = (
    "a state_dict has a quantized layer's weights packed: give the layer's weight().int_repr(), weight().q_scale() and bias() "
    "under these names"
)


def _unknown(name: str, listed: Sequence[str], known: Collection[str]) -> CallError:
    from difflib import get_close_matches  # only where something is wrong

    layer = name.partition(PACKED)[0] if PACKED in name.split(".") else name[: name.rfind(".") + 1]
    packed = [weight for weight in known if weight.startswith(f"{layer}{PACKED}.")]
    near = packed or get_close_matches(name, known, 1, 0.5)
    names = ", ".join(map(repr, near or list(known)[:3])) + ("" if near else " ...")
    return invalid(f"the program has no weight {name!r}, but {names}", UNPACK if packed else _prefix(name, listed, known))


def _prefix(name: str, names: Sequence[str], known: Collection[str]) -> str:
    """What to do where all names are given with a prefix too many, as DistributedDataParallel has them, or without one; else ""."""
    parts = name.split(".")
    for prefix in [".".join(parts[:count]) + "." for count in range(1, len(parts))]:
        if all(weight.startswith(prefix) for weight in names) and name.removeprefix(prefix) in known:
            return f"remove the prefix {prefix!r} from the names"
    for prefix in sorted({weight.removesuffix(name) for weight in known if weight.endswith(f".{name}")}):
        if all(prefix + weight in known for weight in names):
            return f"put the prefix {prefix!r} before the names"
    return ""


def _check_kind(name: str, contents: Contents, row: Weight, device: int | None) -> None:
    if contents.dtype != row.dtype:
        raise invalid(f"weight {name!r}: expected {row.dtype}, got {contents.dtype}")
    if contents.shape != row.shape:
        raise invalid(f"weight {name!r}: expected shape {list(row.shape)}, got {list(contents.shape)}")
    if contents.device not in (None, device):
        here = "the CPU" if device is None else f"the CPU or CUDA device {device}"
        raise invalid(f"weight {name!r}: expected a tensor on {here}, got one on device {contents.device}")


def _check_tied(name: str, contents: Contents, row: Weight, other: tuple[str, Contents]) -> None:
    if other[1] is contents:
        return
    mine, theirs = [(value.file, value.begin, value.address, value.strides) for value in (contents, other[1])]
    if mine != theirs and contents.digest(row) != other[1].digest(row):
        raise invalid(f"weights {other[0]!r} and {name!r} are one tensor in the model, and differ")


def _check_complete(manifest: Manifest, fixed: Mapping[str, FrozenWeight], chosen: Mapping[int, tuple[str, Contents]]) -> None:
    there = {manifest.weights[index].tensor for index in chosen}
    missing = [row for row in manifest.weights if row.tensor not in there and row.tensor not in fixed]
    names = list({row.tensor: row.name for row in reversed(missing)}.values())[::-1]
    if names:
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        raise invalid(
            f"weight {names[0]!r} is missing{more}", "give all weights, or say partial=True to replace those that are given"
        )


def _check_kept(name: str, contents: Contents, row: Weight, fixed: FrozenWeight) -> None:
    if contents.digest(row) != fixed.sha256:
        reason = REASONS[fixed.reason].format(where=fixed.where)
        raise CallError("update-refused", f"weight {name!r} {reason}, and the new value differs", HINTS[fixed.reason])
