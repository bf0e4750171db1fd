"""The interface of a target, CPU or GPU, to programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .profile import Profile
    from .update import Contents, OpenFile


class Results(Protocol):
    """Outputs of one replay. `addresses` are valid while this object lives; `device`: CUDA device, None for the CPU; `static`:
    every replay of the program has these addresses. `transfer_ownership` returns an owner of one output, once, or None if the
    output cannot outlive this object. `release`: the caller no longer uses the other outputs."""

    @property
    def addresses(self) -> Sequence[int]: ...
    @property
    def device(self) -> int | None: ...
    @property
    def static(self) -> bool: ...
    def release(self) -> None: ...
    def transfer_ownership(self, index: int) -> object | None: ...


class Backend(Protocol):
    """Runs the programs of a bundle with the memories of one session. `device`: the CUDA device whose tensors it accepts beside the
    CPU's, or None. `owner` keeps weights and state alive on a CPU. Users of the memories hold a `turn`, and call `begin` before the
    first use and `end` after the last, or use `locked` for all three; the result of `begin` is the `stream` of the other methods.
    Raises ProgramClosed after `close`, and SessionBusy in a session that another thread uses.

    `update` replaces checked weights of memory weights by position, tied ones together. Later calls of `sessions` (backends over
    the same weights) use the new weights, and no call mixes old and new ones. `files` have the contents. `ready` is called right
    before the change. Nothing changes if it or `update` raises. `fast_path` returns, for an `outputs.Caller`, a function (addresses
    on the device, views) -> result of the call, which does `begin`, the checks of views, the counts, `run`, `finish` and `end`; or
    None."""

    @property
    def device(self) -> int | None: ...
    @property
    def owner(self) -> object: ...
    @property
    def code_bytes(self) -> int: ...  # bytes of kernel images that every session loads for itself
    @property
    def turn(self) -> AbstractContextManager[None]: ...  # exclusive use for one call, also released by an interrupt
    def begin(self, stream: int | None) -> Any: ...  # on a stream of the device (None: the backend's own)
    def end(self, stream: Any) -> None: ...  # if an interrupt prevents this, the next `begin` waits for the work
    def locked(self, stream: int | None) -> AbstractContextManager[Any]: ...  # for measurements and tests
    # replays a program on inputs at `addresses` of `device`, laid out like its values
    def run(self, program: int, addresses: Sequence[int], device: int | None, stream: Any) -> Results: ...
    def fast_path(self, program: int, caller: Any) -> Callable[..., Any] | None: ...
    def session(self) -> Backend: ...  # the same programs, weights and code with other memories
    def buffers(self, program: int) -> tuple[list[int], object]: ...  # addresses of the static inputs, and their owner
    # bytes of the device: `copy` in stream order; `write` is complete on return; `read` waits for earlier calls
    def copy(self, target: int, source: int, size: int, stream: Any) -> None: ...
    def write(self, address: int, data: bytes, stream: Any) -> None: ...
    def read(self, address: int, size: int, stream: Any) -> bytes: ...
    # a weight of memory weights or state: its address during a call, or without `stream` now; its bytes in memory order, after
    # earlier calls; `store` copies from `device`; from the CPU (None), the copy is complete on return
    def address(self, weight: int, stream: Any = None) -> int: ...
    def fetch(self, weight: int, stream: Any) -> bytes: ...
    def store(self, weight: int, address: int, device: int | None, stream: Any) -> None: ...
    def update(
        self, contents: Mapping[int, Contents], sessions: Sequence[Any], files: Sequence[OpenFile], ready: Callable[[], None]
    ) -> None: ...
    @property
    def updated(self) -> bool: ...  # whether the weights were replaced
    def reset(self, stream: Any) -> None: ...  # sets state to its initial values
    def populate(self) -> None: ...  # loads the weights that calls read into memory
    def watch(self, profile: Profile | None) -> None: ...  # times all steps; None ends it, and adds missing times
    # overwrites memory that no replay may read before it writes it; without `reserved` except donated outputs
    def poison(self, byte: int, *, reserved: bool = True) -> None: ...
    def close(self) -> None: ...  # waits for running calls, then frees everything; may be called twice
