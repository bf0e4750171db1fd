"""First calls read weights from disk, build deferred graphs, page in code, and start OpenMP's threads, which spin while one of them
waits for a page. Warmup reads the weights first, then replays int_keys on the inputs of the self-test: other inputs might be
invalid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, create_string_buffer
from functools import partial
from typing import Any

from ..format.file_names import SELF_TEST, self_test_entry
from ..format.safetensors_files import Mapped, stored
from ..format.schema import STATE, EntrySpec, Manifest
from ..tensors.tensor import Tensor, from_bytes
from .locks import closed, during
from .outputs import Session

Warmup = tuple[EntrySpec, tuple[int, ...], Callable[[Sequence[Any]], object]]
"""An entry, one of its int_keys, and the replay, which takes tensors in the signature's order."""


def warm_up(session: Session, manifest: Manifest, calls: Sequence[Warmup]) -> None:
    """Makes each call once, and then restores state and random numbers. With state, calls of other threads wait. Raises
    program-closed, and as a call."""
    backend = session.backend
    if session.self_test is None:
        raise closed(manifest.name)
    backend.populate()
    state = [index for index, weight in enumerate(manifest.weights) if weight.memory == STATE]
    stored = Mapped(session.self_test.descriptor, SELF_TEST)

    def replay_all() -> None:
        for entry, key, replay in calls:
            if state:
                during(backend, None, backend.reset)
            replay(inputs_of(stored, entry, key))

    try:
        if not state:
            return replay_all()
        with backend.turn:
            before = [(index, during(backend, None, partial(backend.fetch, index))) for index in state]
            try:
                replay_all()
            finally:
                for index, data in before:
                    memory = create_string_buffer(data, max(1, len(data)))
                    during(backend, None, partial(backend.store, index, addressof(memory), None))
    finally:
        stored.close()


def inputs_of(self_test: Mapped, entry: EntrySpec, key: tuple[int, ...]) -> list[Tensor]:
    """The self-test's inputs for `key`, copied."""
    names = [self_test_entry(key, "input", index, entry.name) for index in range(len(entry.inputs))]
    return [from_bytes(stored(self_test, name), self_test.entries[name].dtype, self_test.entries[name].shape) for name in names]
