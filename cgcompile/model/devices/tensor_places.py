"""The place of each tensor of one call: on the host, on the device, or free.

Inputs of the model are on the device.  The result of an operation is where its tensors are.  A tensor that no operation created (a
parameter, a buffer, a constant) is free: it follows the other tensors of an operation, and is on the device by default.  As in
PyTorch, a tensor without dimensions on the host can be combined with tensors on the device.  PyTorch raises an error for any other
mixture, which is an obstacle here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ..side_effects import Obstacle, SideEffects
from ..user_code import called_here, here
from .markers import TO_DEVICE, TO_HOST
from .tracing import called, is_traced, tensors_in

HOST, DEVICE, FREE = "host", "device", "free"
"""Places of a tensor."""

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
"""The devices that the user's code sees for tensors on the host, and for tensors on the device if it is a GPU."""


class TensorPlaces:
    """The place of every tensor of one call of the user's model, whose tensors are on the device `real`.  `target_device` is the
    device of the bundle.  If it is the CPU there is only one place, and moves to a GPU do nothing.  `effects` gets the obstacles.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], real: torch.device, target_device: torch.device) -> None:
        self.real = real
        self.target_device = target_device
        self.effects = SideEffects()
        self._places: Any = WeakTensorKeyDictionary()
        for tensor in inputs:
            self._places[tensor] = DEVICE

    def place(self, tensor: torch.Tensor) -> str:
        """Returns HOST, DEVICE, or FREE if no operation created the tensor."""
        location: str = self._places.get(tensor, FREE)
        return location

    def device(self, tensor: torch.Tensor, real: torch.device) -> torch.device:
        """Returns the device that the user's code sees.  Tensors on the meta device keep their device."""
        if real.type == "meta":
            return real
        return CPU if self.place(tensor) == HOST else self.target_device

    def named(self, device: Any) -> str | None:
        """Returns the place of a device in the user's code, or None for the meta device."""
        torch_device = torch.device(plain_device(device))
        if torch_device.type == "meta":
            return None
        if torch_device.type == "cpu":
            return DEVICE if self.target_device == CPU else HOST
        if torch_device.type != "cuda" or torch_device.index:
            self.saw("several-devices", f"a tensor on {torch_device}: a bundle runs on one GPU and the host")
        self.to_gpu()
        return DEVICE

    def to_gpu(self) -> None:
        """Records that the user's code names a GPU."""
        if self.target_device == CPU:
            self.saw("moved-to-gpu", "a tensor is moved to a GPU, and the bundle is for the CPU")

    def note(self, tensor: torch.Tensor, place: str) -> None:
        """Records the place of `tensor`."""
        self._places[tensor] = place

    def moved(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        """Returns `tensor` at `place`, with a marker if it was elsewhere."""
        current_place = self.place(tensor)
        if current_place == place or (current_place == FREE and place == DEVICE):
            return tensor
        tensor_copy: torch.Tensor
        if self.real == CPU or is_traced([tensor]):
            tensor_copy = called(TO_HOST if place == HOST else TO_DEVICE, [tensor], {})
        else:
            tensor_copy = tensor.to(CPU if place == HOST else self.real, copy=True)
        self._places[tensor_copy] = place
        return tensor_copy

    def noted(self, result: Any, side: str, wanted: str | None = None) -> Any:
        """Records that the tensors of a result are at `side`, and moves them to `wanted` if that is another place."""
        for tensor in tensors_in(result):
            self._places[tensor] = side
        if wanted is None or wanted == side or (side == FREE and wanted == DEVICE):
            return result
        return pytree.tree_map_only(torch.Tensor, lambda tensor: self.moved(tensor, wanted), result)

    def saw(self, rule: str, message: str) -> None:
        """Records an obstacle at the user's line, once."""
        where, source = here()
        obstacle = Obstacle(rule=rule, message=message + called_here(), where=where, source=source)
        if obstacle not in self.effects.obstacles:
            self.effects.obstacles.append(obstacle)


def plain_device(value: Any) -> Any:
    """Converts a number to a GPU device.  torch.device(number) would look for a GPU on this machine."""
    return torch.device("cuda", value) if type(value) is int else value
