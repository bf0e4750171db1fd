"""Forks of this process.  A child inherits memory, but not OpenMP's threads, which run CPU code, and not the GPU's context.  A call
in the child would hang, or fail with an unclear error."""

from __future__ import annotations

import os

from ..errors import CallError


class Forks:
    """The state of the whole process.  `number` counts the forks that led to this process.  `threads` and `gpu`: this process has
    run CPU code, or has a GPU context.  `lost_threads` and `lost_gpu`: a process from which it was forked had.
    """

    __slots__ = ("gpu", "lost_gpu", "lost_threads", "number", "threads")

    def __init__(self) -> None:
        self.number = 0
        self.threads = self.gpu = self.lost_threads = self.lost_gpu = False

    def count(self) -> None:
        """In the child, right after the fork."""
        self.number += 1
        self.lost_threads, self.lost_gpu = self.lost_threads or self.threads, self.lost_gpu or self.gpu
        self.threads = self.gpu = False

    def check_threads(self) -> None:
        """Raises process-forked if CPU code would wait for threads of a parent."""
        if self.lost_threads:
            raise CallError(
                "process-forked", "this process was forked after its parent had run CPU code, whose threads do not exist here"
            )

    def check_gpu(self) -> None:
        """Raises process-forked if a parent used the GPU: CUDA does not work after a fork."""
        if self.lost_gpu:
            raise CallError("process-forked", "this process was forked after its parent had used the GPU: CUDA does not work here")


FORKS = Forks()
os.register_at_fork(after_in_child=FORKS.count)


def forked(name: str) -> CallError:
    """The error for a program that was loaded before a fork and is used after it."""
    return CallError("process-forked", f"program {name!r} was loaded before this process was forked, and works in the parent only")
