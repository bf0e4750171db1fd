"""Where the tensors of one call are: on the host, on the device, or free to be on either.

An input of the model is on the device; what an operation makes is where its tensors are.  A tensor that no operation made
(a parameter, a buffer, a constant) is free: it goes with the others, and is on the device by itself.  A tensor of no dimensions on
the host may be combined with tensors on the device, as in PyTorch.  Any other mixture is PyTorch's error, and an obstacle here.
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
"""What the user's code is told of a tensor on the host, and of one on the device where that is a GPU."""


class TensorPlaces:
    """The place of every tensor of one call of the user's model, whose tensors are on the device `real`.

    `target_device`: where the bundle will run.  On the CPU there is one place, and a move to a GPU moves nothing.  `effects` gets
    what cannot be followed.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], real: torch.device, target_device: torch.device) -> None:
        self.real = real
        self.target_device = target_device
        self.effects = SideEffects()
        self._places: Any = WeakTensorKeyDictionary()
        for tensor in inputs:
            self._places[tensor] = DEVICE

    def place(self, tensor: torch.Tensor) -> str:
        """HOST, DEVICE, or FREE for what no operation made."""
        location: str = self._places.get(tensor, FREE)
        return location

    def device(self, tensor: torch.Tensor, real: torch.device) -> torch.device:
        """What the user's code is told.  Tensors without memory keep their device."""
        if real.type == "meta":
            return real
        return CPU if self.place(tensor) == HOST else self.target_device

    def named(self, device: Any) -> str | None:
        """The place of a device as the user writes it, None for one without memory (meta)."""
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
        """The user's code names a GPU."""
        if self.target_device == CPU:
            self.saw("moved-to-gpu", "a tensor is moved to a GPU, and the bundle is for the CPU")

    def note(self, tensor: torch.Tensor, place: str) -> None:
        """From now on `tensor` is at `place`."""
        self._places[tensor] = place

    def moved(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        """`tensor` at `place`, with a marker where it was elsewhere."""
        there = self.place(tensor)
        if there == place or (there == FREE and place == DEVICE):
            return tensor
        tensor_copy: torch.Tensor
        if self.real == CPU or is_traced([tensor]):
            tensor_copy = called(TO_HOST if place == HOST else TO_DEVICE, [tensor], {})
        else:
            tensor_copy = tensor.to(CPU if place == HOST else self.real, copy=True)
        self._places[tensor_copy] = place
        return tensor_copy

    def noted(self, result: Any, side: str, wanted: str | None = None) -> Any:
        """The result of an operation that ran at `side`, with its tensors noted there, and moved where `wanted` says so."""
        for tensor in tensors_in(result):
            self._places[tensor] = side
        if wanted is None or wanted == side or (side == FREE and wanted == DEVICE):
            return result
        return pytree.tree_map_only(torch.Tensor, lambda tensor: self.moved(tensor, wanted), result)

    def saw(self, rule: str, message: str) -> None:
        """Notes an obstacle at the user's line, once."""
        where, source = here()
        seen = Obstacle(rule=rule, message=message + called_here(), where=where, source=source)
        if seen not in self.effects.obstacles:
            self.effects.obstacles.append(seen)


def plain_device(value: Any) -> Any:
    """A number names a GPU; torch looks for one when it is asked about it."""
    return torch.device("cuda", value) if type(value) is int else value
