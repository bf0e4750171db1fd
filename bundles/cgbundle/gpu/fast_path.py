"""The backend's part of a call on the fast path, in one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..call.locks import ExclusiveLock, closed
from ..cuda.driver import Context, check, cu
from ..process import FORKS, forked
from .programs import BoundProgram, Programs
from .streams import StreamOrder

if TYPE_CHECKING:
    from ..call.outputs import Caller


def _launched(bound: BoundProgram, caller: Caller) -> Callable[[Any], Any]:
    """Launches a program's steps in stream order, and returns the result of the call."""
    steps, copying, finish, fresh = bound.steps, bound.copying, caller.finish, caller.fresh
    launch = steps[0]

    def plain(stream: Any) -> Any:
        launch(stream)
        return finish(stream)

    def several(stream: Any) -> Any:
        for step in steps:
            step(stream)
        return finish(stream)

    if copying is None or fresh is None:
        return plain if len(steps) == 1 else several

    def with_copies(stream: Any) -> Any:
        allocated = fresh()
        return plain(stream) if allocated is None or not copying(allocated[1], stream) else allocated[0]

    return with_copies


def fast_path(
    lock: ExclusiveLock, forks: int, programs: Programs, number: int, order: StreamOrder, context: Context, caller: Caller
) -> Callable[[list[int], Sequence[Any]], Any]:
    """`Backend.fast_path` for a bound program that writes to no input, in the session of `lock`. `forks`: `FORKS.number` at load.
    To save microseconds, it calls the parts of a `Turn`."""
    bound = programs.ready[number]
    inputs, device, current_context = bound.inputs, context.index, context.handle
    stream, counts, finish, run = caller.stream, caller.counts, caller.finish, _launched(bound, caller)
    owned, take, release = lock.plain.owned, lock.plain.take, lock.plain.release
    push, pop = cu.cuCtxPushCurrent, cu.cuCtxPopCurrent
    only = inputs[0] if len(inputs) == 1 and not bound.donated else None

    def call(addresses: list[int], views: Sequence[Any]) -> Any:
        if forks != FORKS.number:
            raise forked(lock.name)
        inside = owned()
        try:
            inside or take()
            if lock.closed:
                raise closed(lock.name)
            error = push(current_context)
            if error:
                check("cuCtxPushCurrent", error)
            try:
                handle = stream(device)
                if views or handle != order.last:
                    return in_order(addresses, handle, views)
                for count in counts:
                    count.number += 1
                if only is None:
                    return replayed(addresses, handle)
                if addresses[0] != only.at:
                    only.take(addresses[0], handle)
                return run(handle)
            finally:
                error = pop(None)
                if error:
                    check("cuCtxPopCurrent", error)
        finally:
            if not inside:
                try:  # noqa: SIM105  a context manager in Python could be interrupted
                    release()
                except RuntimeError:  # as in `Turn`
                    pass

    def replayed(addresses: list[int], handle: Any) -> Any:
        if bound.donated:
            other = programs.over_donated(number, bound, addresses, handle)
            if other is not bound:
                other.replay(addresses, handle)
                return finish(handle)
        for address, place in zip(addresses, inputs):  # noqa: B905
            if address != place.at:
                place.take(address, handle)
        return run(handle)

    def in_order(addresses: list[int], current: int | None, views: Sequence[Any]) -> Any:
        handle = order.begin(current)
        try:
            for view in views:
                view.tensor  # noqa: B018
            for count in counts:
                count.number += 1
            if order.captured:
                joined = programs.over_donated(number, bound, addresses, handle) if bound.donated else bound
                joined.join(addresses, handle)
                return finish(handle)
            return replayed(addresses, handle)
        finally:
            order.end(handle)

    return call
