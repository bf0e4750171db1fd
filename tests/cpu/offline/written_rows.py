"""Handwritten recordings: tensors placed one after the other, launches with parameter blocks as the driver packs them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cgbundle.format.safetensors_files import write
from cgbundle.format.schema import MEMORIES, Value, Weight
from cgbundle.validate.module_state import Address, Relocation
from cgcompile.bundle.recordings import Edge, Function, KernelNode, Node, Recording
from cgcompile.offline.interpret.interpret import Stage, Task
from cgcompile.offline.lowered import KernelVariant

KINDS = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8", torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
"""Triton's dtype names."""

SCALARS = {"i32": "i", "i64": "q", "fp32": "f"}


class Sheet:
    """A recording under construction. `weight`, `input` and `output` place tensors and return their Values; `launch` adds a row,
    and `cut` starts the next recording."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.rows: list[Weight] = []
        self.inputs: list[tuple[Value, bytes]] = []
        self.outputs: list[Value] = []
        self.nodes: list[Node] = []
        self.functions: list[Function] = []
        self.stages: list[Stage] = []
        self.variants: list[tuple[tuple[str, str], KernelVariant]] = []
        self.ends = dict.fromkeys(("weights", "inputs", "arena"), 0)

    def place(self, memory: str, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None) -> Value:
        """Reserves 256-byte aligned memory for a tensor."""
        like = torch.empty(0, dtype=dtype)
        strides = tuple(strides or torch.empty(tuple(shape), device="meta").stride())
        count = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        offset = self.ends[memory]
        self.ends[memory] += -(-count * like.element_size() // 256) * 256
        return Value(dtype=str(dtype).removeprefix("torch."), shape=tuple(shape), strides=strides, memory=memory, offset=offset)

    def weight(self, tensor: torch.Tensor) -> Value:
        value = self.place("weights", tensor.dtype, tensor.shape)
        name = f"w{len(self.rows)}"
        self.weights[name] = tensor
        row = Weight(
            name=name,
            tensor=name,
            dtype=value.dtype,
            shape=value.shape,
            strides=value.strides,
            memory="weights",
            offset=value.offset,
        )
        self.rows.append(row)
        return value

    def input(self, tensor: torch.Tensor) -> Value:
        value = self.place("inputs", tensor.dtype, tensor.shape, tensor.stride())
        self.inputs.append((value, raw(tensor)))
        return value

    def output(self, dtype: torch.dtype, shape: Sequence[int]) -> Value:
        self.outputs.append(self.place("arena", dtype, shape))
        return self.outputs[-1]

    def launch(self, source: str, grid: tuple[int, int, int], *arguments: Value | Address | float, **constants: Any) -> None:
        """Adds a row that runs the function `kernel` in `source`. Numbers are "i32", or "fp32" if they are floats."""
        code = source.strip("\n")
        names = [part.split(":")[0].strip() for part in code.split("def kernel(")[1].split(")")[0].split(",")]
        signature, block, relocations, params = [], bytearray(), [], []
        for name, value in zip(names, arguments, strict=False):
            kind, data, target = _packed(value)
            signature.append((name, kind))
            block += bytes(-len(block) % len(data))
            params.append((len(block), len(data)))
            if target:
                relocations.append(Relocation(at=len(block), target=target))
            block += data
        block += bytes(-len(block) % 8)
        params += [(len(block), 8), (len(block) + 8, 8)]
        signature += [(name, "constexpr") for name in constants]
        image = hashlib.sha256(f"{code}{constants}{signature}".encode()).hexdigest()
        self.functions.append(Function(image=image, symbol="kernel", params=tuple(params), attributes=()))
        variant = KernelVariant(
            name="kernel", source=code, signature=tuple(signature), constants=tuple(constants.items()), divisible=(), warps=4,
            stages=1, options=(), selected_by="only",
        )  # fmt: skip
        self.variants.append(((image, "kernel"), variant))
        self.nodes.append(
            KernelNode(
                function=len(self.functions) - 1, grid=grid, threads=(128, 1, 1), shared=0, block=bytes(block) + bytes(16),
                relocations=tuple(relocations), undefined=(), attributes=(),
            )
        )  # fmt: skip

    def cut(self, *read: Value, key: tuple[int, ...] = (1,)) -> None:
        """Ends a stage, after which `read` is read."""
        edges = tuple(Edge(source=i, target=i + 1, from_port=0, to_port=0, type=0) for i in range(len(self.nodes) - 1))
        recording = Recording(key=key, functions=tuple(self.functions), nodes=tuple(self.nodes), edges=edges)
        self.stages.append(Stage(inputs=tuple(self.inputs), recording=recording if self.nodes else None, read=read))
        self.inputs, self.functions, self.nodes = [], [], []

    def task(self, folder: Path, key: tuple[int, ...] = (1,)) -> Task:
        """Ends the last stage and returns the task; writes its weights to `folder`. The rows of each stage form a chain."""
        path = folder / "weights.safetensors"
        with open(path, "wb") as file:
            named = self.weights.items()
            write(file, {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape), partial(raw, t)) for n, t in named})
        self.cut(*self.outputs, key=key)
        return Task(
            key=key,
            stages=tuple(self.stages),
            variants=tuple(self.variants),
            sizes=tuple(self.ends.items()),
            weights=((path, tuple(self.rows)),),
        )


def raw(tensor: torch.Tensor) -> bytes:
    """Returns row-major bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor_of(contents: bytes, value: Value) -> torch.Tensor:
    """Converts row-major bytes to a tensor."""
    return torch.frombuffer(bytearray(contents), dtype=getattr(torch, value.dtype)).reshape(value.shape)


def address(value: Value) -> Address:
    """Returns the address of a tensor."""
    return Address(memory=MEMORIES.index(value.memory), offset=value.offset)


def _packed(value: Value | Address | float) -> tuple[str, bytes, Address | None]:
    match value:
        case Value():
            return "*" + KINDS[getattr(torch, value.dtype)], bytes(8), address(value)
        case Address():
            return "*fp32", bytes(8), value
        case int():
            return "i32", struct.pack("<i", value), None
        case _:
            return "fp32", struct.pack("<f", value), None
