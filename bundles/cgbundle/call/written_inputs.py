"""A loaded bundle whose model writes to some of its inputs: a call leaves in the caller's own tensors what the model wrote.

The backend works on the caller's memory, or brings it up to date when the replay is done.  What a backend cannot work on, because
it is laid out otherwise than recorded, goes through a copy that is copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CallError
from ..format.schema import DTYPES, Manifest
from ..program import Backend, Program
from ..tensors.interface import Library, Place
from ..tensors.overlap import folds, reach, shared
from ..tensors.tensor import Tensor, dense, is_dense


class WritingProgram(Program):
    """A `Program` whose calls change the inputs that `manifest.written` lists."""

    def __init__(self, manifest: Manifest, backend: Backend, on_miss: str, outputs: str) -> None:
        super().__init__(manifest, backend, on_miss, outputs)
        self._held: Sequence[Any] = ()

    def replay(self, tensors: Sequence[Any]) -> list[Any]:
        """As `Program.replay`; raises input-unwritable, before anything runs, for a tensor that cannot be written to."""
        if not self.manifest.written or len(tensors) != len(self.inputs):
            return super().replay(tensors)  # which refuses another number
        library = self._library(tensors)
        taken = [library.take(tensor, spec.name) for tensor, spec in zip(tensors, self.inputs, strict=True)]
        self._check_apart(library, taken)
        given, back = list(tensors), []
        for index in self.manifest.written:
            target = library.writable(tensors[index], self.inputs[index].name)
            if self._fits(index, taken[index][1]) and not self._in_place(library, index, target, taken[index]):
                given[index] = self._copy(library, index, tensors[index], taken[index][0])
                back.append((target, given[index]))
        made = super().replay(given)
        # an output of the CPU may lie in an input's memory: a view of it lasts until the next call, and so does the input
        self._held = given if self._views else ()
        for target, copied in back:
            target[tuple([slice(0, size) for size in copied.shape])] = copied
        return made

    def close(self) -> None:
        """As `Program.close`."""
        super().close()
        self._held = ()

    def _check_apart(self, library: Library, taken: Sequence[tuple[Any, Place]]) -> None:
        """Raises input-unwritable where memory that is written to is also another input's, or twice this one's."""
        found = []
        for value, (address, shape, dtype, _, _) in taken:
            found.append(reach(address, shape, library.steps(value), DTYPES.get(dtype, 1)))
        for index in self.manifest.written:
            if taken[index][1][3] is not None and folds(found[index]):
                raise CallError(
                    "input-unwritable",
                    f"input {self.inputs[index].name!r}: the model writes to it, and its elements share memory",
                    "pass a copy of the expanded tensor",
                )
        for one, other in shared(found, self.manifest.written):
            raise CallError(
                "input-unwritable",
                f"input {self.inputs[one].name!r}: the model writes to it, and it shares memory with input "
                f"{self.inputs[other].name!r}",
                "pass a copy of one of them",
            )

    def _fits(self, index: int, place: Place) -> bool:
        """Whether the guards will let an input pass as far as a copy depends on it; they say what is wrong."""
        spec = self.inputs[index]
        return len(place[1]) == len(spec.shape) and place[2] == spec.dtype and place[4] in (None, self._backend.device)

    def _in_place(self, library: Library, index: int, target: Any, taken: tuple[Any, Place]) -> bool:
        value, (address, shape, _, strides, _) = taken
        steps = dense(shape) if strides is None else library.strides(value)
        return is_dense(shape, steps, self.inputs[index].order) and library.read(target)[0] == address

    def _copy(self, library: Library, index: int, tensor: Any, value: Any) -> Any:
        if library.name == "plain" and not (isinstance(tensor, Tensor) and tensor.device is None):
            raise CallError(
                "input-unwritable",
                f"input {self.inputs[index].name!r}: the model writes to it, and it is not laid out as recorded",
                "pass a tensor whose axes lie in memory in the order of the signature, without gaps",
            )
        return library.ordered(value, self.inputs[index].order)
