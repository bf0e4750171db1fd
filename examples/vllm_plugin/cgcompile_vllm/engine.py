"""Finds the graphs of vLLM's engine: the tensors that they use, the graphs by key, and where vLLM stores them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

Key = tuple[int | str, ...]

DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip


class KeptGraph(torch.cuda.CUDAGraph):
    """A graph whose nodes torch keeps, and whose cuBLAS workspace is in the graphs' own memory.

    A workspace of an earlier call would be in memory that no named tensor covers.  torch's graph trees clear it, too.
    """

    def __init__(self) -> None:
        """Sets keep_graph, which vLLM does not set."""
        super().__init__(True)

    def capture_begin(self, *args: Any, **options: Any) -> None:
        torch._C._cuda_clearCublasWorkspaces()
        super().capture_begin(*args, **options)

    def capture_end(self) -> None:
        super().capture_end()
        torch._C._cuda_clearCublasWorkspaces()


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A graph of a part of the model.  `kind`: the type that the part returns, "tensor", "list" or "tuple"; `values`: what it
    returns, ("name", name of a tensor) or ("value", another value)."""

    index: int
    tokens: int
    kind: str
    values: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> Key:
        """Its key in the bundle."""
        return ("piece", self.tokens, self.index)

    @property
    def names(self) -> list[str]:
        """The names of its tensors in the bundle."""
        return [value for kind, value in self.values if kind == "name"]


def full_key(descriptor: Any) -> Key:
    """Returns the key of a graph of the whole model."""
    return ("full", descriptor.num_tokens, descriptor.num_reqs or 0, descriptor.uniform_token_count or 0)


def engine_tensors(runner: Any) -> dict[str, torch.Tensor]:
    """Returns every dense GPU tensor of a model runner by its attribute path.  If an object has two paths, the shorter one is used,
    because attributes that only some starts have are nested deeper."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    waiting: deque[tuple[str, Any]] = deque([("runner", runner)])
    while waiting:
        name, value = waiting.popleft()
        if isinstance(value, torch.Tensor):
            if value.is_cuda and value.layout is torch.strided and value.dtype in DTYPES and value.numel():
                tensors[name] = value.detach()
        elif id(value) not in seen and not isinstance(value, (torch.fx.GraphModule, CUDAGraphWrapper)):
            seen.add(id(value))
            waiting += [(f"{name}.{part}", child) for part, child in _parts(value)]
    return tensors


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the children of an object.  Only vLLM's objects, modules and plain containers are searched."""
    if isinstance(value, dict):
        return [(key, child) for key, child in value.items() if isinstance(key, (str, int))]
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, nn.Module) or type(value).__module__.startswith("vllm."):
        return getattr(value, "__dict__", {}).items()
    return ()


def write_inputs(runner: Any, key: Key) -> None:
    """Writes inputs for a replay, like a step of the engine: all tokens differ, and each has its own place in the KV cache.  After
    a capture, the inputs write nothing to the cache, and the attention schedule is that of the last graph."""
    kind, tokens = key[0], int(key[1])
    if kind == "full":
        prepare_inputs_to_capture(
            int(key[2]) or tokens, tokens, runner.model_state, runner.input_buffers, runner.block_tables, runner.attn_groups,
            runner.kv_cache_config,
        )  # fmt: skip
    buffers = (runner.input_buffers.input_ids, runner.input_buffers.positions, runner.block_tables.slot_mappings)
    for buffer, most in zip(buffers, (runner.vocab_size, runner.max_model_len, 1 << 62), strict=True):
        buffer.copy_(torch.arange(buffer.shape[-1], device=buffer.device) % most)


def wrappers() -> dict[int, CUDAGraphWrapper]:
    """Returns the parts of the compiled model by index.  Raises ValueError if several models are compiled."""
    parts: dict[int, CUDAGraphWrapper] = {}
    for wrapper in CUDAGraphWrapper._all_instances:
        index = wrapper.runnable.piecewise_compile_index
        if index in parts:
            raise ValueError("more than one compiled model is captured")
        parts[index] = wrapper
    return parts


def captured_pieces(parts: Mapping[int, CUDAGraphWrapper]) -> tuple[list[Piece], dict[Key, Any], dict[str, torch.Tensor]]:
    """Returns the graphs of the parts in the replay order of a forward pass, the graphs by key, and the tensors that they return.

    Tensors are named by their place in a part's result, because which tensors share memory differs from process to process.
    """
    pieces: list[Piece] = []
    graphs: dict[Key, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    rows = [(entry.batch_descriptor.num_tokens, index, entry) for index, entry in _entries(parts)]
    for tokens, index, entry in sorted(rows, key=lambda row: (-row[0], row[1])):
        output = entry.output
        kind, values_of_part = (type(output).__name__, output) if isinstance(output, (list, tuple)) else ("tensor", [output])
        values: list[tuple[str, Any]] = []
        for position, value in enumerate(values_of_part):
            name = f"piece.{tokens}.{index}.{position}"
            if isinstance(value, torch.Tensor):
                tensors[name] = value
                values.append(("name", name))
            else:
                values.append(("value", value))
        piece = Piece(index=index, tokens=tokens, kind=kind, values=tuple(values))
        pieces.append(piece)
        graphs[piece.key] = entry.cudagraph
    return pieces, graphs, tensors


def _entries(parts: Mapping[int, CUDAGraphWrapper]) -> Iterator[tuple[int, CUDAGraphEntry]]:
    for index, wrapper in parts.items():
        for entry in wrapper.concrete_cudagraph_entries.values():
            yield index, entry


def give_pieces(
    pieces: Iterable[Piece], parts: Mapping[int, CUDAGraphWrapper], graphs: Mapping[Any, Any], tensors: Mapping[str, Any]
) -> None:
    """Stores attached graphs where vLLM stores captured ones: all of them, or none if one is missing.  Raises KeyError."""
    entries = []
    for piece in pieces:
        values = [tensors[value] if kind == "name" else value for kind, value in piece.values]
        output = values[0] if piece.kind == "tensor" else tuple(values) if piece.kind == "tuple" else values
        descriptor = BatchDescriptor(num_tokens=piece.tokens)
        entry = CUDAGraphEntry(batch_descriptor=descriptor, cudagraph=graphs[piece.key], output=output)
        entries.append((parts[piece.index].concrete_cudagraph_entries, entry))
    for entries_of_part, entry in entries:
        entries_of_part[entry.batch_descriptor] = entry
