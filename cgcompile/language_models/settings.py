"""Chooses sizes and dtype of a language model from the user's options, else from its configuration and the machine.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BuildError
from ..targets.choice import Options
from ..targets.memory_layout import RECORDED_STATES
from .folder import ModelFolder

PAGE = 16
"""Tokens in a page of the cache."""

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}

LONGEST_GPU, LONGEST_CPU = 8192, 2048
"""Default maximum number of tokens of a text.  By default a load reserves this much cache for every lane."""

LANES_GPU, LANES_CPU = (1, 8, 32), (1, 4)
CHUNKS_GPU, CHUNKS_CPU = (128, 512), (64,)
"""Default numbers of prompt tokens in one call."""

PIECE = 64
"""Prompt tokens in each lane of a prefill call that has several lanes: as many queries as one thread block of the kernel in
kernels/prefill.py processes (`ROWS`).  So several prompts can share a call."""

RANK, LARGEST_RANK = 16, 512
"""Default maximum rank of adapters, and the limit of this option."""

OF_A_LANE = 2
"""Pages per lane in the cache of a build.  The cache also has space for at least one text of full length."""

TURNS_GPU = 32
"""Maximum tokens of one call of `generate`.  On a CPU the overhead of a call is small, and `decode` suffices."""

LOOPED = 32
"""Maximum lanes of `generate`.  With more lanes a step takes so long that a server can prepare the next one meanwhile."""

RECORDING = 2 << 30
"""Bytes of a GPU that recording needs in addition to weights and state."""

UNKNOWN_GPU = 32 << 30
"""Maximum bytes of the cache if the GPU is not in this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """`context`: tokens of the longest text.  `lanes`: texts in one call.  `chunks`: prompt tokens of a prefill call; `piece`:
    tokens in each of its lanes, 0 if it has one lane.  `turns`: maximum tokens of a call of `generate`, 0 without `generate`.
    `pages`, `slots`: the numbers with which CausalLM is built, number 0 included; a load may choose more, not fewer.  `most_pages`:
    pages for the longest text in every lane; `page_bytes`: approximate bytes of a page.  `adapters`: the number of LoRA adapters, 0
    for none; `rank`: their maximum rank."""

    context: int
    lanes: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]
    piece: int
    turns: int
    pages: int
    slots: int
    most_pages: int
    page_bytes: int
    adapters: int
    rank: int

    @property
    def state(self) -> dict[str, tuple[str, int]]:
        """The buffers whose number of rows a load chooses, as `state()` of a model file returns them (cli/docs/models.md): name or
        pattern of names -> (dimension of the rows, maximum)."""
        pages = ("pages", self.most_pages)
        rows = ("slots", self.slots)
        return {"keys_*": pages, "values_*": pages, "seen": rows, "deferred": rows, "biases": rows}

    @property
    def sizes(self) -> dict[str, dict[str, list[int]]]:
        """The sizes of the dimensions of every entry."""
        blocks = [self.context // PAGE]
        steps = {"batch": list(self.lanes), "blocks": blocks}
        reads = {"batch": [1], "seq": list(self.chunks)}
        if self.piece:
            reads = {"batch": [chunk // self.piece for chunk in self.chunks], "seq": [self.piece]}
        entry_sizes = {"prefill": reads | {"blocks": blocks}, "decode": steps, "choose": {"batch": list(self.lanes)}}
        looped = [number for number in self.lanes if number <= LOOPED]
        entry_sizes |= {"generate": steps | {"batch": looped}} if self.turns else {}
        return entry_sizes | ({"load_adapter": {}} if self.adapters else {})


def check_settings(folder: ModelFolder, options: Options) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns lanes and chunks as numbers, () for defaults.  Raises option-invalid."""
    context, dtype, adapters, adapter_rank = options.context, options.dtype, options.adapters, options.adapter_rank
    if dtype is not None and dtype not in DTYPES:
        raise BuildError("option-invalid", f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    longest = longest_text(folder)
    if context is not None and not PAGE <= context <= longest:
        problem = f"context {context}: expected {PAGE} to {longest} tokens, the longest text of {folder.name}"
        raise BuildError("option-invalid", problem)
    numbers, chunks = numbers_of(options.lanes), numbers_of(options.chunk)
    if any(number < 1 for number in numbers) or len(set(numbers)) < len(numbers):
        problem = f"lanes {options.lanes!r}: expected distinct positive whole numbers"
        raise BuildError("option-invalid", problem, "for example --lanes 1,8,32")
    if any(number < PIECE or number % PIECE for number in chunks) or len(set(chunks)) < len(chunks):
        problem = f"chunk {options.chunk!r}: expected distinct multiples of {PIECE} tokens"
        raise BuildError("option-invalid", problem, "for example --chunk 128,512,2048")
    if adapters < 0:
        raise BuildError("option-invalid", f"adapters {adapters}: expected 1 or more, or 0 for none")
    if adapter_rank is not None and not adapters:
        problem = "adapter_rank is the largest rank of adapters, and the bundle is to have none"
        raise BuildError("option-invalid", problem, "give --adapters, too: how many there may be")
    if adapter_rank is not None and not 1 <= adapter_rank <= LARGEST_RANK:
        raise BuildError("option-invalid", f"adapter_rank {adapter_rank}: expected 1 to {LARGEST_RANK}")
    return tuple(sorted(numbers)), tuple(sorted(chunks))


def numbers_of(text: Sequence[int] | str) -> tuple[int, ...]:
    """Parses integers; returns (0,) for invalid text."""
    try:
        return tuple([int(word) for word in (text.split(",") if isinstance(text, str) else text) if str(word).strip()])
    except ValueError:
        return (0,)


def settings_for(folder: ModelFolder, options: Options, gpu: int | None, *, pieces: bool = False) -> Settings:
    """Returns the settings.  `pieces`: whether a prefill call may have several lanes of one text.  `gpu`: the bytes of the GPU, 0
    if unknown, None for a processor.  A GPU that captures the model holds the cache several times.  Raises option-invalid."""
    numbers, chunks = check_settings(folder, options)
    adapters, recorded = options.adapters, options.record != "cross-compile"
    rank = (options.adapter_rank or RANK) if adapters else 0
    numbers = numbers or (LANES_CPU if gpu is None else LANES_GPU)
    longest = options.context or min(longest_text(folder), LONGEST_CPU if gpu is None else LONGEST_GPU)
    blocks = max(1, longest // PAGE)
    kind = options.dtype or ("float32" if gpu is None else configured_dtype(folder))
    page = PAGE * token_elements(folder) * DTYPES[kind]
    free_bytes = cache_room(gpu, (folder.weights + adapters * adapter_numbers(folder, rank)) * DTYPES[kind], recorded)
    pages = max(blocks, min(blocks, OF_A_LANE) * numbers[-1])
    if pages > free_bytes // page:
        need, available = -(-pages * page >> 20), max(0, free_bytes >> 20)
        problem = f"context {blocks * PAGE}: the cache takes about {need} MiB at least, and there is room for {available}"
        raise BuildError("option-invalid", problem, "give a smaller --context, or --dtype bfloat16")
    chunks = chunks or (CHUNKS_CPU if gpu is None else CHUNKS_GPU)
    chunks = tuple([size for size in chunks if size <= blocks * PAGE]) or (blocks * PAGE,)
    piece = PIECE if pieces and not any(size % PIECE for size in chunks) else 0
    turns = 0 if gpu is None or numbers[0] > LOOPED else TURNS_GPU
    return Settings(
        context=blocks * PAGE, lanes=numbers, dtype=kind, chunks=chunks, piece=piece, turns=turns, pages=pages + 1,
        slots=numbers[-1] + 1, most_pages=numbers[-1] * blocks + 1, page_bytes=page, adapters=adapters, rank=rank,
    )  # fmt: skip


def longest_text(folder: ModelFolder) -> int:
    """Returns the longest text of the configuration, in tokens."""
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
    return next((value for name in names if type(value := folder.text.get(name)) is int and value >= PAGE), 1 << 20)


def configured_dtype(folder: ModelFolder) -> str:
    """Returns the dtype of config.json, else bfloat16."""
    for part in (folder.text, folder.config):
        for name in ("dtype", "torch_dtype"):
            if (value := str(part.get(name) or "").removeprefix("torch.")) in DTYPES:
                return value
    return "bfloat16"


def number_in(folder: ModelFolder, *names: str, other: int) -> int:
    """Returns a positive number of the configuration, by the first of `names` that it has."""
    return next((value for name in names if type(value := folder.text.get(name)) is int and value > 0), other)


def layers_and_width(folder: ModelFolder) -> tuple[int, int]:
    """Returns the number of decoder layers, and the width of the hidden state."""
    layers = number_in(folder, "num_hidden_layers", "n_layer", "n_layers", "num_layers", other=32)
    return layers, number_in(folder, "hidden_size", "n_embd", "d_model", other=4096)


def token_elements(folder: ModelFolder) -> int:
    """Returns the approximate number of cache elements per token, for all layers; an upper estimate if the configuration does not
    name key heads."""
    layers, width = layers_and_width(folder)
    heads = number_in(folder, "num_attention_heads", "n_head", "n_heads", other=32)
    key_heads = number_in(folder, "num_key_value_heads", "num_kv_heads", other=heads)
    dim = number_in(folder, "head_dim", "v_head_dim", other=-(-width // heads))
    dim = max(dim, number_in(folder, "qk_nope_head_dim", other=0) + number_in(folder, "qk_rope_head_dim", other=0))
    return 2 * layers * key_heads * dim


def adapter_numbers(folder: ModelFolder, rank: int) -> int:
    """Returns the approximate number of elements of an adapter: four projections of attention and three of the MLP."""
    layers, width = layers_and_width(folder)
    inner = number_in(folder, "intermediate_size", "n_inner", "ffn_dim", other=4 * width)
    return layers * rank * (4 * 2 * width + 3 * (width + inner))


def cache_room(gpu: int | None, weights: int, recorded: bool) -> int:
    """Returns the maximum bytes of the cache: a quarter of the memory for a CPU; 90% of what the weights leave on a GPU;
    UNKNOWN_GPU if `gpu` is 0.  A GPU that records the model needs space for several caches."""
    if gpu is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    if not gpu:
        return UNKNOWN_GPU
    room = (gpu - weights) * 9 // 10
    return (room - RECORDING) // RECORDED_STATES if recorded else room
