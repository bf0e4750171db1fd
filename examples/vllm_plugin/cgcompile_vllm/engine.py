"""What vLLM's engine knows about its graphs: the tensors that they read and write, the graphs by key, and where they belong."""

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
    """A graph whose nodes torch keeps, and whose cuBLAS workspace lies in the graphs' own memory.

    A workspace that an earlier call left would lie in memory that no tensor names.  torch's own graph trees clear it too.
    """

    def __init__(self) -> None:
        """vLLM asks for no graph that is kept."""
        super().__init__(True)

    def capture_begin(self, *args: Any, **options: Any) -> None:
        """As torch's."""
        torch._C._cuda_clearCublasWorkspaces()
        super().capture_begin(*args, **options)

    def capture_end(self) -> None:
        """As torch's."""
        super().capture_end()
        torch._C._cuda_clearCublasWorkspaces()


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A graph of a part of the model.  `kind`: what the part returns, "tensor", "list" or "tuple", of `values`: names of tensors,
    or other values themselves."""

    index: int
    tokens: int
    kind: str
    values: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> Key:
        """Its key in the bundle."""
        return ("piece", self.tokens, self.index)


def full_key(descriptor: Any) -> Key:
    """The key of a graph of the whole model."""
    return ("full", descriptor.num_tokens, descriptor.num_reqs or 0, descriptor.uniform_token_count or 0)


def engine_tensors(runner: Any) -> dict[str, torch.Tensor]:
    """Every dense tensor on the GPU that a model runner holds, by the path of attributes that leads to it.  Of two paths to an
    object the shorter one counts: attributes that only some starts have are further down."""
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
            waiting += [(f"{name}.{part}", held) for part, held in _parts(value)]
    return tensors


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """What an object holds.  Only vLLM's own objects, modules and plain containers are looked into."""
    if isinstance(value, dict):
        return [(key, held) for key, held in value.items() if isinstance(key, (str, int))]
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, nn.Module) or type(value).__module__.startswith("vllm."):
        return getattr(value, "__dict__", {}).items()
    return ()


def write_inputs(runner: Any, key: Key) -> None:
    """Inputs for a replay, as a step of the engine would write them: of every token another one, which is written to a place of its
    own in the KV cache.  A capture leaves inputs that write none, and the attention's schedule of the last graph alone."""
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
    """The parts of the compiled model by index.  Raises ValueError where more than one model is compiled."""
    parts: dict[int, CUDAGraphWrapper] = {}
    for wrapper in CUDAGraphWrapper._all_instances:
        index = wrapper.runnable.piecewise_compile_index
        if index in parts:
            raise ValueError("more than one compiled model is captured")
        parts[index] = wrapper
    return parts


def captured_pieces(parts: Mapping[int, CUDAGraphWrapper]) -> tuple[list[Piece], dict[Key, Any], dict[str, torch.Tensor]]:
    """The graphs of the parts, in the order in which a forward pass replays them; by key, and the tensors that they return.

    Tensors are named by their place in what a part returns: which of them share memory differs from process to process.
    """
    pieces: list[Piece] = []
    graphs: dict[Key, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    rows = [(entry.batch_descriptor.num_tokens, index, entry) for index, entry in _entries(parts)]
    for tokens, index, entry in sorted(rows, key=lambda row: (-row[0], row[1])):
        output = entry.output
        kind, held = (type(output).__name__, output) if isinstance(output, (list, tuple)) else ("tensor", [output])
        values: list[tuple[str, Any]] = []
        for position, value in enumerate(held):
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
    """Puts attached graphs where captured ones would be: all of them, or none where one is missing.  Raises KeyError."""
    entries = []
    for piece in pieces:
        values = [tensors[value] if what == "name" else value for what, value in piece.values]
        output = values[0] if piece.kind == "tensor" else tuple(values) if piece.kind == "tuple" else values
        descriptor = BatchDescriptor(num_tokens=piece.tokens)
        entry = CUDAGraphEntry(batch_descriptor=descriptor, cudagraph=graphs[piece.key], output=output)
        entries.append((parts[piece.index].concrete_cudagraph_entries, entry))
    for held, entry in entries:
        held[entry.batch_descriptor] = entry
