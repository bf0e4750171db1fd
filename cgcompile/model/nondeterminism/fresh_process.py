"""Runs the user's model, as `model()` created it, in processes that have not called it.

A build calls its copy of the model many times before torch.export: caches are filled, attributes are set.  A used copy can compute
other results than a new process.  So the build forks a process before the first call.  This process never calls the model.  For
every sequence of calls it forks another process, whose model is new.

A forked process shares the memory of the weights, and needs no imports.  libgomp's threads do not survive a fork: if this process
has started some, the forked one computes with one thread.  CUDA does not survive a fork either.  If this process uses CUDA, or a
forked one cannot, `copied_models` creates a second model in this process.

Private interface: `torch.cuda._is_in_bad_fork` (2.11, 2.13).
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from ...errors import BuildError, ModelError
from ...util.workers import end_with_parent
from ..devices.placing import placed
from ..flat_module import FlatModule, call_eager
from ..source import CPU, Source, sample
from ..tracing.held_tensors import held_tensors
from ..user_code import call_user, first_line
from .kept_values import Kept, kept_values

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""If this variable is set, `torch.cuda.is_available()` does not start CUDA (torch 2.11, 2.13)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The devices of the models, as in `Source`."""

    device: torch.device
    target_device: torch.device
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """The results of one call of a new model: its outputs, and the inputs after the call.  `raised` is the text of an exception,
    with the user's line, or ""."""

    outputs: tuple[torch.Tensor, ...] = ()
    inputs: tuple[torch.Tensor, ...] = ()
    raised: str = ""


class FreshModel(Protocol):
    """A model that is called only through this interface.  `threads` is its number of CPU threads."""

    threads: int

    def send(self, entry: int, tensors: Sequence[torch.Tensor], seed: int, reset: bool = False) -> None:
        """Starts a call of entry number `entry`, with a seed for torch's random numbers.  `reset` restores the buffers before the
        call."""

    def receive(self) -> Called:
        """Returns the results of the call, moved to the CPU.  Raises fresh-failed."""

    def kept(self, calls: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> Kept:
        """Makes the calls (entry, inputs) repeatedly, and returns what the model keeps between them."""


class FreshModels(Protocol):
    """Creates new models."""

    def begin(self, place: Place) -> bool:
        """Sets the devices of all new models.  Returns whether they can run there."""

    def new(self, sizes: Mapping[str, dict[str, int]]) -> Any:
        """Returns a context manager that gives a FreshModel.  `sizes` has those of an example call for each entry, in order of the
        entry numbers."""


class _Calls:
    """A FreshModel in this process."""

    def __init__(self, sources: Sequence[Source], sizes: Mapping[str, dict[str, int]]) -> None:
        self.threads = torch.get_num_threads()
        by_entry = {source.entry: source for source in sources}
        self._sources = [by_entry[entry] for entry in sizes]
        self._flats = [
            FlatModule(source.model, sample(source, chosen), source.device, source.target_device, source.entry, source.capability)
            for source, chosen in zip(self._sources, sizes.values(), strict=True)
        ]
        for flat in self._flats:
            flat.uncalled = True
        self._called = Called()

    def send(self, entry: int, tensors: Sequence[torch.Tensor], seed: int, reset: bool = False) -> None:
        flat, device = self._flats[entry], self._sources[entry].device
        if reset:
            flat.snapshot.restore()
        inputs = tuple([tensor.to(device, copy=True) for tensor in tensors])
        try:
            outputs = call_user(call_eager, f"{flat.entry}()", self._sources[entry].label, flat, inputs, seed)
        except ModelError as error:
            self._called = Called(raised=str(error))
        else:
            self._called = Called(
                outputs=tuple([output.detach().cpu() for output in outputs]), inputs=tuple([tensor.cpu() for tensor in inputs])
            )

    def receive(self) -> Called:
        return self._called

    def kept(self, calls: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> Kept:
        device = self._sources[0].device
        return kept_values([(self._flats[entry], [tensor.to(device) for tensor in tensors]) for entry, tensors in calls])


# --- forked models ---------------------------------------------------------------------------------------------------


class _Forked:
    """New models in forked processes.  This object sends calls through a pipe."""

    def __init__(self, connection: Connection, process: int) -> None:
        self._connection, self._process = connection, process
        self.threads = 1

    def begin(self, place: Place) -> bool:
        supported, self.threads = self._ask("begin", place)
        return bool(supported)

    @contextmanager
    def new(self, sizes: Mapping[str, dict[str, int]]) -> Iterator[_Forked]:
        self._ask("new", sizes)
        try:
            yield self
        finally:
            with suppress(BuildError):
                self._ask("end")

    def send(self, entry: int, tensors: Sequence[torch.Tensor], seed: int, reset: bool = False) -> None:
        _put(self._connection, ("call", entry, tuple([tensor.cpu() for tensor in tensors]), seed, reset))

    def receive(self) -> Called:
        result: Called = self._answer()
        return result

    def kept(self, calls: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> Kept:
        kept: Kept = self._ask("kept", [(entry, tuple([tensor.cpu() for tensor in tensors])) for entry, tensors in calls])
        return kept

    def close(self) -> None:
        with suppress(ProcessLookupError):  # it is not yet a process group leader
            os.killpg(self._process, signal.SIGKILL)
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        self._connection.close()

    def _ask(self, command: str, *content: object) -> Any:
        _put(self._connection, (command, *content))
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise _ended() from None
        if isinstance(answer, BuildError):
            raise answer
        return answer


def _ended() -> ModelError:
    return ModelError("fresh-failed", "the process that calls a new copy of the model was killed, or crashed")


@contextmanager
def forked_models(sources: Sequence[Source]) -> Iterator[FreshModels]:
    """Forks the process for new models of the sources.  Call it before anything else uses the sources."""
    parent_end, child_end = Pipe()
    parent, threads = os.getpid(), _threads_after_a_fork()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about a fork with threads
        process = os.fork()
    if not process:
        parent_end.close()
        _run(child_end, sources, parent, threads)
    child_end.close()
    models = _Forked(parent_end, process)
    try:
        yield models
    finally:
        models.close()


def _threads_after_a_fork() -> int:
    """Returns the number of torch's threads, or 1 if native threads run, which do not exist after a fork."""
    return torch.get_num_threads() if len(os.listdir("/proc/self/task")) <= threading.active_count() else 1


def _run(connection: Connection, sources: Sequence[Source], parent: int, threads: int) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        end_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the build ends this process
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        gc.freeze()  # do not finalize the build's objects
        torch.set_num_threads(threads)
        _serve(connection, sources, threads)
        status = 0
    finally:
        os._exit(status)


def _serve(connection: Connection, sources: Sequence[Source], threads: int) -> None:
    """Runs the process that never calls the model.  For each `new`, it forks a process that calls the model, and waits for it."""
    while True:
        command, *content = pickle.loads(connection.recv_bytes())
        if command == "begin":
            (place,) = content
            sources = [replace(source, target_device=place.target_device, capability=place.capability) for source in sources]
            device = place.device
            if device == CPU:
                _leave_cuda_alone()
            supported = not torch.cuda._is_in_bad_fork() and (device == CPU or _cuda_works())
            _put(connection, (supported, threads))
        elif process := os.fork():
            _, status = os.waitpid(process, 0)
            if status:
                _put(connection, _ended())
        else:
            end_with_parent(os.getppid())
            _call(connection, sources, device, *content)
            os._exit(0)


def _call(connection: Connection, sources: Sequence[Source], device: torch.device, sizes: Mapping[str, dict[str, int]]) -> None:
    """Runs the calls of a new model until the command "end".  Seeds NumPy's generator again after the fork, as Python seeds its
    generator.  Otherwise NumPy would draw the same numbers as in the build."""
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    with ExitStack() as stack:
        try:
            real_device = stack.enter_context(placed(replace(sources[0], owned=True), device)).device
            calls = _Calls([replace(source, device=real_device) for source in sources], sizes)
        except BuildError as error:
            _put(connection, error)
            return
        _put(connection, None)
        while True:
            command, *content = pickle.loads(connection.recv_bytes())
            if command == "end":
                _put(connection, None)
                return
            if command == "call":
                calls.send(*content)
                _put(connection, calls.receive())
            else:
                _put(connection, calls.kept(*content))


def _leave_cuda_alone() -> None:
    """Prevents Dynamo from starting CUDA, which takes memory and time.  Dynamo would start it to read the generator's state and the
    stream."""
    torch.accelerator.is_available = lambda: False
    torch.cuda.get_rng_state = lambda device="cuda": torch.empty(0, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda new_state, device="cuda": None


def _cuda_works() -> bool:
    """Returns whether CUDA can start.  It cannot if the parent process started it before the fork.  Tests this in another process,
    because this process must not start CUDA before later forks."""
    process = os.fork()
    if not process:
        status = 1
        try:
            torch.cuda.init()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(process, 0)[1] == 0


def _put(connection: Connection, value: object) -> None:
    try:
        connection.send_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    except (BrokenPipeError, ConnectionError):
        if isinstance(value, tuple):
            raise _ended() from None
        os._exit(1)


# --- copied models ---------------------------------------------------------------------------------------------------


class _Copied:
    """New models in this process.  They share classes and modules with the build's model."""

    def __init__(self, make: Callable[[], Sequence[Source]]) -> None:
        self._make = make

    def begin(self, place: Place) -> bool:
        self._place = place
        return True

    @contextmanager
    def new(self, sizes: Mapping[str, dict[str, int]]) -> Iterator[FreshModel]:
        sources = [
            replace(source, target_device=self._place.target_device, capability=self._place.capability, owned=True)
            for source in self._make()
        ]
        with placed(sources[0], self._place.device) as first:
            yield _Calls([replace(source, device=first.device) for source in sources], sizes)


def models_at(
    place: Place, models: FreshModels, sources: Sequence[Source], again: Callable[[], Sequence[Source]] | None
) -> FreshModels:
    """Returns `models` on these devices, or `copied_models` if they cannot run there."""
    if not models.begin(place):
        models = copied_models(sources, again)
        models.begin(place)
    return models


def copied_models(sources: Sequence[Source], again: Callable[[], Sequence[Source]] | None) -> FreshModels:
    """Returns new models in this process: `again` creates the sources again.  If it is None, copies the current model.  Raises
    fresh-failed for a model that cannot be copied."""
    if again is not None:
        return _Copied(lambda: _with_weights(again(), sources[0].model))
    first_copy = _copy(sources)
    return _Copied(lambda: _copy(first_copy))


def _with_weights(sources: Sequence[Source], like: torch.nn.Module) -> Sequence[Source]:
    """Copies the weights of an existing model to the sources, because model() may draw other weights."""
    first = {**dict(like.named_parameters()), **dict(like.named_buffers())}
    with torch.no_grad():
        for name, tensor in [*sources[0].model.named_parameters(), *sources[0].model.named_buffers()]:
            if name in first and first[name].shape == tensor.shape:
                tensor.copy_(first[name])
    return sources


def _copy(sources: Sequence[Source]) -> Sequence[Source]:
    model = sources[0].model
    tensors = [*model.buffers(), *[slot.tensor for slot in held_tensors(model)]]
    # deepcopy refuses tensors that were computed with gradients, as by weight_norm
    memory: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}
    try:
        model_copy = copy.deepcopy(model, memory)
    except Exception as error:
        text = f"{sources[0].label}: the model cannot be copied (copy.deepcopy: {type(error).__name__}: {first_line(error)})"
        raise ModelError("fresh-failed", text, "build it from a model file, or before the process uses CUDA") from error
    return [replace(source, model=model_copy) for source in sources]


@contextmanager
def cuda_left_alone() -> Iterator[None]:
    """Stops `torch.cuda.is_available()`, which many model files call, from starting CUDA inside this context.  Then a forked
    process can still use CUDA."""
    if NVML_CHECK in os.environ:
        yield
        return
    os.environ[NVML_CHECK] = "1"
    try:
        yield
    finally:
        os.environ.pop(NVML_CHECK, None)
