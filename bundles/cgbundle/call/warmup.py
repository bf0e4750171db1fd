"""First calls, whose costs are paid ahead.

A first call reads the weights from the disk, builds the graphs that `lazy=True` put off, touches the code of torch's libraries and
of the bundle, and starts OpenMP's threads, which spin while one of them waits for a page.  So the weights come first.  Then every
int_key is replayed on the inputs that the build has proved it with: made up numbers could be no valid input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, create_string_buffer
from functools import partial
from typing import Any

from ..format.file_names import SELF_TEST
from ..format.safetensors import Mapped
from ..format.schema import STATE, EntrySpec, Manifest
from ..tensors.self_test_tensors import inputs_of
from .locks import closed, during
from .outputs import Session

Warmup = tuple[EntrySpec, tuple[int, ...], Callable[[Sequence[Any]], object]]
"""What is replayed: an entry, one of its int_keys, and the replay, which takes tensors in the order of the signature."""


def warm_up(session: Session, manifest: Manifest, calls: Sequence[Warmup]) -> None:
    """Makes each of the calls once; state, and that of random numbers, is then what it was.  Other threads' calls wait where
    there is any.  Raises as a call does, and program-closed."""
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
