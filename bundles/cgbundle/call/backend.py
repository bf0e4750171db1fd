"""What a program needs of a target, the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..weights.update import Contents, OpenFile
    from .profile import Profile


class Results(Protocol):
    """The outputs of one replay.  `addresses` are valid while this object lives; `device` is their CUDA device,
    None for the CPU; `static` says that every replay of this program gives these same addresses."""

    @property
    def addresses(self) -> Sequence[int]: ...

    @property
    def device(self) -> int | None: ...

    @property
    def static(self) -> bool: ...

    def release(self) -> None:
        """Nobody looks at the outputs any more, but at what `transfer_ownership` gave."""

    def transfer_ownership(self, index: int) -> object | None:
        """What alone keeps output `index` alive from now on, for a caller who is given its memory; None where it is not to be given
        away.  Asked for once."""


class Backend(Protocol):
    """Runs the programs of a bundle and keeps the memories of one session.

    `device` is the CUDA device whose tensors it takes beside those of the CPU, or None; `owner` keeps memories weights and state
    alive.  Whoever uses the memories has a `turn`, a context, and in it calls `begin` before the first use and `end` behind the
    last, or calls `locked`, which does all three; what they give is the `stream` of the other methods.  It raises ProgramClosed
    after `close`, and in a session SessionBusy while another thread has its turn.
    """

    @property
    def device(self) -> int | None: ...

    @property
    def owner(self) -> object: ...

    @property
    def code_bytes(self) -> int:
        """Bytes of the kernel images that every session loads for itself."""

    @property
    def turn(self) -> AbstractContextManager[None]:
        """The memories for one call.  Wherever it is interrupted, the next one may have its turn."""

    def begin(self, stream: int | None) -> Any:
        """Begins work that goes to a stream of the device (None: the backend's own); `end` is to be called with what this gives."""

    def end(self, stream: Any) -> None:
        """Ends the work that was begun.  Where an interrupt left this out, the next `begin` waits for it."""

    def locked(self, stream: int | None) -> AbstractContextManager[Any]:
        """`turn`, `begin` and `end` as one context, for measurements and tests: an interrupt may come before it ends."""

    def run(self, program: int, addresses: Sequence[int], device: int | None, stream: Any) -> Results:
        """Replays a program on inputs at `addresses` of `device`, laid out as its values say; the outputs lie there too."""

    def fast_path(self, program: int, caller: Any) -> Callable[..., Any] | None:
        """For a `fast_path.Caller`, (addresses on the device, views) -> what the call gives: `begin` on the caller's stream, a look
        at each view's `tensor`, the counts, `run`, `finish` and `end` in one piece.  None where there is none such."""

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        """Copies bytes from one place on the device to another, in the order of the stream."""

    def session(self) -> Backend:
        """The same programs with memory of their own, over the same weights and code."""

    def buffers(self, program: int) -> tuple[list[int], object]:
        """The addresses of a program's static input buffers on the device, and what keeps them alive."""

    def address(self, weight: int, stream: Any = None) -> int:
        """Where a weight of memory weights or state lies on the device: for a call, or now (None)."""

    def fetch(self, weight: int, stream: Any) -> bytes:
        """A weight's bytes in the order of memory; waits for the calls before."""

    def store(self, weight: int, address: int, device: int | None, stream: Any) -> None:
        """Copies to a weight as many bytes as it has, from `device`; from the CPU (None) it is done when this returns."""

    def write(self, address: int, data: bytes, stream: Any) -> None:
        """Copies bytes to an address of the device's memory; done when this returns."""

    def read(self, address: int, size: int, stream: Any) -> bytes:
        """Bytes of the device's memory, when the calls before are done."""

    def update(
        self, contents: Mapping[int, Contents], sessions: Sequence[Any], files: Sequence[OpenFile], ready: Callable[[], None]
    ) -> None:
        """Gives weights of memory weights other contents, by their positions, which are checked: those of tied ones to all of them.

        A call uses the old weights or the new ones; of those of `sessions`, backends over the same weights, each that begins later
        uses the new.  `files`: what the contents lie in.  `ready` is called when nothing is left but to change them.  Nothing has
        changed where this raises, or `ready` does."""

    @property
    def updated(self) -> bool:
        """Whether the weights are others than the bundle's."""

    def reset(self, stream: Any) -> None:
        """Brings back what state held at first."""

    def populate(self) -> None:
        """Brings what calls read of the weights into memory of the device, and of this process."""

    def watch(self, profile: Profile | None) -> None:
        """From now on the steps of every program are timed for a profile; None ends it, and adds what is still missing there."""

    def poison(self, byte: int, *, reserved: bool = True) -> None:
        """Overwrites what no replay may read before it has written it; without `reserved` all but what chains keep."""

    def close(self) -> None:
        """Waits for those that hold it, then frees everything; may be called twice."""
