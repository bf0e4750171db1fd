"""Compiles kernel variants to images in processes that need no GPU, with a cache.  With all images cached, it imports neither torch
nor Triton.  An image depends only on its variant, the architecture, and the versions of Triton (with its ptxas) and torch (whose
helpers the kernels call).  Therefore Triton's environment variables are hidden from the processes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import BuildError
from ...targets.cuda.elf import WRITABLE, read_cubin
from ...util.content_cache import cache_path, recall, remember
from ...util.progress import Tell
from ...util.scratch import scratch_folder
from ...util.workers import Kind, Request, ask
from ..lowered import KernelVariant
from .cubin_info import read_kernel_info

LARGEST_TENSOR_MEMORY = 512
"""Columns of tensor memory of a multiprocessor (sm_100, sm_103).  Triton's CompiledKernel has the same limit."""

LARGEST_BLOCK = 1024
"""The maximum threads of a block, on every architecture so far."""

SETTINGS = re.compile(r"(TRITON|MLIR|LLVM|NVPTX|PTXAS|DISABLE_PTXAS|AMDGCN|USE_IR_LOC|TORCHINDUCTOR|TORCH_COMPILE)")
"""Prefixes of environment variables that change Triton's output or search paths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelImage:
    """Triton's output for a variant.  `shared` (dynamic) and scratch memory: bytes per block.  `blocks`: per cluster."""

    image: bytes
    symbol: str
    shared: int
    tensor_columns: int
    warps: int
    blocks: int
    global_scratch: int
    profile_scratch: int
    cooperative: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledKernel:
    """A kernel image and how it is launched.

    `params`: (type, name) of the parameters that take arguments, in order, with the types of `KernelVariant.signature`.  `layout`:
    (offset, size) in bytes of all parameters: first those of `params`, then 2 or 0 `scratch_pointers`, which are null.  `shared`:
    dynamic shared memory in bytes.  `threads`: per block.  `cluster`: blocks per axis; a variant's grid counts clusters.
    """

    image: bytes
    sha256: str
    symbol: str
    params: tuple[tuple[str, str], ...]
    layout: tuple[tuple[int, int], ...]
    scratch_pointers: int
    shared: int
    threads: int
    cluster: tuple[int, int, int]
    cooperative: bool


def compile_variants(
    variants: Sequence[KernelVariant], arch: str, *, shared_limit: int, cache: Path, workers: int | None = None, tell: Tell
) -> tuple[CompiledKernel, ...]:
    """Compiles the variants that are not in `cache` for `arch` ("sm_90"), in `workers` processes (default: one per processor).
    `shared_limit`: the most bytes of shared memory that the target allows per block.  Raises kernel-failed, kernel-too-large,
    kernel-unsupported, worker-died, image-format."""
    # `selected_by` does not affect the image
    cache_paths = {variant: cache_path(cache, "kernels", arch, replace(variant, selected_by="")) for variant in variants}
    variants_by_path = {path: variant for variant, path in cache_paths.items()}
    images: dict[Path, KernelImage] = {path: image for path in variants_by_path if (image := recall(path, KernelImage)) is not None}
    if missing := {path: variant for path, variant in variants_by_path.items() if path not in images}:
        tell(f"{len(missing)} of {len(variants_by_path)} kernels to compile")
        requests = {path: Request(content=(variant, arch), what=f"kernel {variant.name}") for path, variant in missing.items()}
        with scratch_folder() as scratch:
            kind = Kind(
                module="cgcompile.offline.compile.worker",
                folder=scratch,
                died="worker-died",
                title="its compiler",
                environment={
                    "TRITON_CACHE_DIR": os.fspath(scratch / "triton"),
                    "TRITON_DISABLE_LINE_INFO": "1",  # keeps file names and line numbers out of images
                },
                hidden=SETTINGS.match,
            )
            for count, (path, image) in enumerate(ask(kind, requests, workers), 1):
                remember(path, image)
                images[path] = image
                tell(f"{count} of {len(missing)} kernels: {missing[path].name}")
    return tuple([finish(variant, images[cache_paths[variant]], shared_limit) for variant in variants])


def finish(variant: KernelVariant, kernel: KernelImage, shared_limit: int) -> CompiledKernel:
    """Checks Triton's metadata of a kernel against its image and the target's limits.  Raises kernel-too-large, kernel-unsupported,
    kernel-failed if image and metadata differ, and image-format."""
    what = f"kernel {variant.name}"
    threads = kernel.warps * 32
    large = [
        (kernel.shared, shared_limit, f"{kernel.shared} bytes of shared memory per block, the target has {shared_limit}"),
        (threads, LARGEST_BLOCK, f"blocks of {kernel.warps} warps, {threads} threads of at most {LARGEST_BLOCK}"),
        (
            kernel.tensor_columns,
            LARGEST_TENSOR_MEMORY,
            f"{kernel.tensor_columns} columns of tensor memory, a block has {LARGEST_TENSOR_MEMORY}",
        ),
    ]
    for needed, limit, text in large:
        if needed > limit:
            raise BuildError("kernel-too-large", f"{what} needs {text}")
    for kind, size in (("global", kernel.global_scratch), ("profile", kernel.profile_scratch)):
        if size:
            raise BuildError("kernel-unsupported", f"{what} needs {size} bytes of {kind} scratch memory per block")
    for symbol in read_cubin(kernel.image, what).data:
        if symbol.section == WRITABLE:
            raise BuildError(
                "kernel-unsupported", f"{what} has a variable that it may write, {symbol.name}, in memory of the image"
            )
    params = tuple((type_, name) for name, type_ in variant.signature if type_ != "constexpr")
    for type_, name in params:
        if type_.startswith(("tensordesc", "nvTmaDesc")):
            text = f"parameter {name} is a tensor descriptor, which has to be made on the device"
            raise BuildError("kernel-unsupported", f"{what}: {text}")
    info = read_kernel_info(kernel.image, kernel.symbol, what)
    extra = info.params[len(params) :]
    mismatch = ""
    if len(info.params) < len(params) or len(extra) not in (0, 2) or any(size != 8 for _, size in extra):
        mismatch = f"takes {len(info.params)} parameters, its signature has {len(params)} and scratch"
    elif info.threads not in (None, (threads, 1, 1)):
        mismatch = f"requires blocks of {info.threads} threads, Triton's metadata has {threads}"
    elif (info.cluster or (1, 1, 1)) != (kernel.blocks, 1, 1):
        mismatch = f"requires clusters of {info.cluster} blocks, Triton's metadata has {kernel.blocks}"
    if mismatch:
        raise BuildError("kernel-failed", f"{what}: its image {mismatch}")
    return CompiledKernel(
        image=kernel.image,
        sha256=hashlib.sha256(kernel.image).hexdigest(),
        symbol=kernel.symbol,
        params=params,
        layout=info.params,
        scratch_pointers=len(extra),
        shared=kernel.shared,
        threads=threads,
        cluster=(kernel.blocks, 1, 1),
        cooperative=kernel.cooperative,
    )
