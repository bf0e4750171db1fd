"""The interface of a target, CPU or GPU, to programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..weights.update import Contents, OpenFile
    from .profile import Profile


class Results(Protocol):
    """Outputs of one replay. `addresses` are valid while this object lives; `device`: CUDA device, None for the CPU; `static`:
    every replay of the program has these addresses."""

    @property
    def addresses(self) -> Sequence[int]: ...

    @property
    def device(self) -> int | None: ...

    @property
    def static(self) -> bool: ...

    def release(self) -> None:
        """The caller no longer uses the outputs, except those of `transfer_ownership`."""

    def transfer_ownership(self, index: int) -> object | None:
        """The owner of output `index` for a caller who gets its memory, or None if it cannot be given away. Call it once."""


class Backend(Protocol):
    """Runs the programs of a bundle with the memories of one session. `device`: the CUDA device whose tensors it accepts beside the
    CPU's, or None. `owner` keeps weights and state alive. Users of the memories hold a `turn`, and call `begin` before the first
    use and `end` after the last, or use `locked` for all three; the result of `begin` is the `stream` of the other methods. Raises
    ProgramClosed after `close`, and SessionBusy in a session that another thread uses."""

    @property
    def device(self) -> int | None: ...

    @property
    def owner(self) -> object: ...

    @property
    def code_bytes(self) -> int:
        """Bytes of the kernel images that every session loads for itself."""

    @property
    def turn(self) -> AbstractContextManager[None]:
        """Exclusive use of the memories for one call, also released by an interrupt."""

    def begin(self, stream: int | None) -> Any:
        """Begins work on a stream of the device (None: the backend's own); pass the result to `end`."""

    def end(self, stream: Any) -> None:
        """Ends the work. If an interrupt prevents this, the next `begin` waits for it."""

    def locked(self, stream: int | None) -> AbstractContextManager[Any]:
        """`turn`, `begin` and `end` as one context, for measurements and tests."""

    def run(self, program: int, addresses: Sequence[int], device: int | None, stream: Any) -> Results:
        """Replays a program on inputs at `addresses` of `device`, laid out like its values."""

    def fast_path(self, program: int, caller: Any) -> Callable[..., Any] | None:
        """For a `fast_path.Caller`, a function (addresses on the device, views) -> result of the call, which does `begin`, the
        checks of views, the counts, `run`, `finish` and `end`; or None."""

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        """Copies bytes on the device, in stream order."""

    def session(self) -> Backend:
        """The same programs, weights and code with memories of their own."""

    def buffers(self, program: int) -> tuple[list[int], object]:
        """The addresses of a program's static input buffers, and their owner."""

    def address(self, weight: int, stream: Any = None) -> int:
        """The address of a weight in memory weights or state, for a call, or now (None)."""

    def fetch(self, weight: int, stream: Any) -> bytes:
        """A weight's bytes in memory order, after the earlier calls."""

    def store(self, weight: int, address: int, device: int | None, stream: Any) -> None:
        """Copies a weight's bytes from `device`; from the CPU (None) the copy is complete on return."""

    def write(self, address: int, data: bytes, stream: Any) -> None:
        """Copies bytes to an address of the device; complete on return."""

    def read(self, address: int, size: int, stream: Any) -> bytes:
        """Bytes of the device, after the earlier calls."""

    def update(
        self, contents: Mapping[int, Contents], sessions: Sequence[Any], files: Sequence[OpenFile], ready: Callable[[], None]
    ) -> None:
        """Replaces checked weights of memory weights by position, tied ones together. Later calls of `sessions` (backends over the
        same weights) use the new weights, each call either old or new ones. `files` hold the contents. `ready` is called right
        before the change. Nothing changes if this or `ready` raises."""

    @property
    def updated(self) -> bool:
        """Whether the weights were replaced."""

    def reset(self, stream: Any) -> None:
        """Resets state to its initial values."""

    def populate(self) -> None:
        """Loads the weights that calls read into memory."""

    def watch(self, profile: Profile | None) -> None:
        """Times the steps of every program for a profile; None ends it, and adds the times that are still missing."""

    def poison(self, byte: int, *, reserved: bool = True) -> None:
        """Overwrites memory that no replay may read before it writes it; without `reserved` except donated outputs."""

    def close(self) -> None:
        """Waits for running calls, then frees everything; may be called twice."""
