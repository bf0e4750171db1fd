"""The cpu backend: every program is one host step; weights are mapped and used in place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import Array, addressof, c_void_p

from . import libtorch
from .archive import WEIGHTS
from .errors import WrongMachine
from .host import POINTER_BYTES, HostRegion, layout_of, open_region
from .processor import check_features
from .running import Running
from .safetensors import Mapped
from .schema import Manifest, Target


def check_machine(target: Target) -> None:
    """Raises WrongMachine unless this machine's processor has what the code uses."""
    machine = os.uname().machine
    if machine != target.arch:
        raise WrongMachine(f"the bundle is for {target.arch} processors, this machine is {machine}")
    check_features(target.features)


class Outputs:
    """The output tensors of one replay, in memory that torch's allocator owns until the last reference to this goes."""

    __slots__ = ("_handles", "_torch", "addresses")

    device: int | None = None
    static = False

    def __init__(self, torch: libtorch.LibTorch, handles: Array[c_void_p]) -> None:
        self._torch, self._handles = torch, handles
        found = (c_void_p * len(handles))()
        place = addressof(found)
        for handle in handles:
            torch.data_pointer(handle, place)
            place += POINTER_BYTES
        self.addresses = [address or 0 for address in found]

    def __del__(self) -> None:
        for handle in self._handles:
            self._torch.delete(handle)


class CpuBackend:
    """Runs the programs of a cpu bundle.  Thread-safe: replays share no memory but the weights.

    Raises LibraryMissing, LibraryRefused, WrongMachine, WeightsInvalid.
    """

    device: int | None = None

    def __init__(self, path: str, manifest: Manifest) -> None:
        check_machine(manifest.target)
        self._running = Running(manifest.name)
        self._torch = libtorch.load(manifest.target.torch)
        self._regions: list[HostRegion] = []
        self._weights = Mapped(os.path.join(path, WEIGHTS), WEIGHTS)
        try:
            for region in manifest.regions:
                self._regions.append(open_region(path, region, manifest.weights, self._weights, self._torch))
            self._inputs = [
                [layout_of(program.values[index], self._torch) for index in program.inputs] for program in manifest.programs
            ]
            for program in manifest.programs:
                self._regions[program.steps[0].region].check_counts(len(program.inputs), len(program.outputs))
        except BaseException:
            self.close()
            raise
        self._run = [(self._regions[program.steps[0].region].run, len(program.outputs)) for program in manifest.programs]

    def turn(self, stream: int | None) -> Running:
        """Waits for nothing: replays run side by side."""
        return self._running

    def run(self, program: int, addresses: Sequence[int], device: int | None = None, turn: None = None) -> Outputs:
        """Replays `program` on inputs at `addresses`, laid out as its values say; the outputs are laid out likewise."""
        run, outputs = self._run[program]
        return Outputs(self._torch, run(addresses, self._inputs[program], outputs))

    def poison(self, byte: int) -> None:
        """Nothing: a replay's memory is fresh from torch's allocator."""

    def close(self) -> None:
        """Waits for running replays, then frees what the backend holds."""
        self._running.close()
        for region in self._regions:
            region.close()
        self._regions.clear()
        self._weights.close()
