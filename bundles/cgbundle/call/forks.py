"""Forks of this process. A child has no OpenMP threads, which run CPU code, and no GPU context: calls would hang or fail."""

from __future__ import annotations

import os

from ..errors import CallError


class Forks:
    """State of this process. `number` counts the forks that led to it. `threads` and `gpu`: it has run CPU code, or has a GPU
    context. `lost_threads` and `lost_gpu`: a parent had."""

    __slots__ = ("gpu", "lost_gpu", "lost_threads", "number", "threads")

    def __init__(self) -> None:
        self.number = 0
        self.threads = self.gpu = self.lost_threads = self.lost_gpu = False

    def count(self) -> None:
        self.number += 1
        self.lost_threads, self.lost_gpu = self.lost_threads or self.threads, self.lost_gpu or self.gpu
        self.threads = self.gpu = False

    def check_threads(self) -> None:
        """Raises process-forked if CPU code would wait for threads of an ancestor."""
        if self.lost_threads:
            raise CallError(
                "process-forked", "this process was forked after its parent had run CPU code, whose threads do not exist here"
            )

    def check_gpu(self) -> None:
        if self.lost_gpu:
            raise CallError("process-forked", "this process was forked after its parent had used the GPU: CUDA does not work here")


FORKS = Forks()
os.register_at_fork(after_in_child=FORKS.count)


def forked(name: str) -> CallError:
    """The error for a program that was loaded before a fork."""
    return CallError("process-forked", f"program {name!r} was loaded before this process was forked, and works in the parent only")
