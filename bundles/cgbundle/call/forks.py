"""Forks of this process.  A child inherits memory, but neither the threads of OpenMP, on which code for the CPU runs, nor the GPU's
context: a call there would wait for ever, or fail without a reason that helps."""

from __future__ import annotations

import os

from ..errors import CallError


class Forks:
    """What is true of a whole process, and so stands once.

    `number` counts the forks that led to this process.  `threads` and `gpu` say that this process has run code for the CPU, and has
    a context on a GPU; `lost_threads` and `lost_gpu` that a process which it was forked from had.
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
        """Raises process-forked where code for the CPU would wait for threads that only a parent has."""
        if self.lost_threads:
            raise CallError(
                "process-forked", "this process was forked after its parent had run CPU code, whose threads do not exist here"
            )

    def check_gpu(self) -> None:
        """Raises process-forked where the driver refuses to work: CUDA cannot be used after a fork."""
        if self.lost_gpu:
            raise CallError("process-forked", "this process was forked after its parent had used the GPU: CUDA does not work here")


FORKS = Forks()
os.register_at_fork(after_in_child=FORKS.count)


def forked(name: str) -> CallError:
    """The error of whoever uses, after a fork, a program that was loaded before."""
    return CallError("process-forked", f"program {name!r} was loaded before this process was forked, and works in the parent only")
