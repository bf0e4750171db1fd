"""A CUDA context that is made in another thread.

Making one takes 0.2 s, as long as everything else in loading a bundle together, and needs nothing but the device's number.  So it
is made while the runtime's modules are imported and the bundle is checked.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..errors import CgbundleError

if TYPE_CHECKING:
    from .driver import Context

MARK = b'"kind":"cuda"'
"""How a manifest for a GPU spells its target.  A wrong guess costs an unused context, nothing else."""


class ContextFuture:
    """The context of GPU number `device`, begun when the bytes of a manifest look like those of a bundle for a GPU."""

    def __init__(self, manifest: bytes, device: int) -> None:
        self._device = device
        self._context: Context | None = None
        self._error: CgbundleError | None = None
        self._thread: threading.Thread | None = None
        if MARK in manifest:
            from . import driver  # here, not in the thread: two threads that import at once wait for each other

            self._driver = driver
            self._thread = threading.Thread(target=self._make, name="cgbundle-context")
            self._thread.start()

    def take(self) -> Context | None:
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

    def _make(self) -> None:
        try:
            self._context = self._driver.Context(self._device)
        except CgbundleError as error:
            self._error = error
