"""A GPU's context that is made in another thread.

Making one takes 0.2 s, as long as everything else in loading a bundle together, and needs nothing but the device's number.  So it
is made while the runtime's modules are imported and the bundle is checked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ..errors import CgbundleError


class Released(Protocol):
    """What is given back when nobody takes it."""

    def release(self) -> None: ...


Made = TypeVar("Made", bound=Released)


class ContextFuture(Generic[Made]):
    """What `make` gives, begun at once; None makes nothing."""

    def __init__(self, make: Callable[[], Made] | None) -> None:
        self._context: Made | None = None
        self._error: CgbundleError | None = None
        self._thread: threading.Thread | None = None
        if make is not None:
            self._thread = threading.Thread(target=self._run, args=(make,), name="cgbundle-context")
            self._thread.start()

    def take(self) -> Made | None:
        """The context, which is the caller's now; None when none was begun.  Raises what making it raised."""
        self._join()
        if self._error is not None:
            raise self._error
        context, self._context = self._context, None
        return context

    def drop(self) -> None:
        """Gives the context back unless it was taken."""
        self._join()
        if self._context is not None:
            self._context.release()
            self._context = None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, make: Callable[[], Made]) -> None:
        try:
            self._context = make()
        except CgbundleError as error:
            self._error = error
