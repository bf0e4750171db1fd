"""Variants -> kernel images for an architecture, on a machine that may have no GPU: in processes of their own, and remembered.

Needs neither torch nor Triton here: with every kernel in the cache, nothing is imported.  What is remembered is named by the hash
of all that an image depends on: the variant, the architecture, and the versions of Triton (which brings its ptxas) and torch (whose
helpers kernels call).  The compiling processes see no setting of Triton from the environment for the same reason.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from ...errors import BuildError
from ...util.content_cache import recall, remember, versions
from ..lowered import KernelVariant
from .cubin_info import read_kernel_info

Tell = Callable[[str], None]

FORMAT = 1
"""Version of `KernelImage` and of how it is made: part of every name in the cache."""

LARGEST_TENSOR_MEMORY = 512
"""Columns of tensor memory of a multiprocessor (sm_100, sm_103); triton's CompiledKernel holds a kernel to the same."""

LARGEST_BLOCK = 1024
"""Threads of a block, on every architecture so far."""

SETTINGS = re.compile(r"(TRITON|MLIR|LLVM|NVPTX|PTXAS|DISABLE_PTXAS|AMDGCN|USE_IR_LOC|TORCHINDUCTOR|TORCH_COMPILE)")
"""Beginnings of environment variables that change what Triton makes, or where it looks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelImage:
    """What Triton made of a variant, from the image and its metadata: dynamic `shared` memory in bytes, `warps` of a block, thread
    blocks of a cluster (`blocks`), scratch memory in bytes per block."""

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

    `params`: (type, name) of the parameters that arguments go to, in order, types as in `KernelVariant.signature`.  `layout`: (offset,
    size) in bytes of all parameters as the image says, those of `params` first; `scratch_pointers` (2 or 0) more follow, all null.
    `shared`: dynamic shared memory in bytes.  `threads` of a block.  `cluster`: blocks per axis; a grid counts clusters.
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
    """Compile every variant for `arch` ("sm_90"), those that stand in folder `cache` excepted.

    `shared_limit`: bytes of shared memory that a block may have there when it asks for more than 48 KiB.  `workers`: processes, by
    default as many as there are processors.  Raises kernel-failed, kernel-too-large, kernel-unsupported, compiler-died, image-format.
    """
    folder = cache / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    made_with = versions()
    names = [_name(variant, arch, made_with) for variant in variants]
    wanted = dict(zip(names, variants, strict=True))
    known: dict[str, KernelImage | None] = {name: recall(folder / name) for name in wanted}
    missing = {name: variant for name, variant in wanted.items() if known[name] is None}
    if missing:
        tell(f"{len(missing)} of {len(wanted)} kernels to compile")
        _compile(missing, arch, folder, workers or os.cpu_count() or 1, tell)
        known |= {name: recall(folder / name) for name in missing}
    found = []
    for variant, name in zip(variants, names, strict=True):
        kernel = known[name]
        if kernel is None:
            raise BuildError(
                "compiler-died", f"kernel {variant.name}: its image was compiled, but could not be read back from {folder}"
            )
        found.append(finish(variant, kernel, shared_limit))
    return tuple(found)


def finish(variant: KernelVariant, kernel: KernelImage, shared_limit: int) -> CompiledKernel:
    """Check what Triton says about a kernel against its image and the target's limits.

    Raises kernel-too-large, kernel-unsupported, kernel-failed when image and metadata disagree, and image-format.
    """
    what = f"kernel {variant.name}"
    if kernel.shared > shared_limit:
        raise BuildError(
            "kernel-too-large", f"{what} needs {kernel.shared} bytes of shared memory per block, the target has {shared_limit}"
        )
    if kernel.warps * 32 > LARGEST_BLOCK:
        raise BuildError(
            "kernel-too-large",
            f"{what} needs blocks of {kernel.warps} warps, {kernel.warps * 32} threads of at most {LARGEST_BLOCK}",
        )
    if kernel.tensor_columns > LARGEST_TENSOR_MEMORY:
        raise BuildError(
            "kernel-too-large",
            f"{what} needs {kernel.tensor_columns} columns of tensor memory, a block has {LARGEST_TENSOR_MEMORY}",
        )
    for kind, size in (("global", kernel.global_scratch), ("profile", kernel.profile_scratch)):
        if size:
            raise BuildError("kernel-unsupported", f"{what} needs {size} bytes of {kind} scratch memory per block")
    params = tuple((type_, name) for name, type_ in variant.signature if type_ != "constexpr")
    for type_, name in params:
        if type_.startswith(("tensordesc", "nvTmaDesc")):
            raise BuildError(
                "kernel-unsupported", f"{what}: parameter {name} is a tensor descriptor, which has to be made on the device"
            )
    entry = read_kernel_info(kernel.image, kernel.symbol, what)
    threads, extra = kernel.warps * 32, entry.params[len(params) :]
    if len(entry.params) < len(params) or len(extra) not in (0, 2) or any(size != 8 for _, size in extra):
        raise BuildError(
            "kernel-failed", f"{what}: its image takes {len(entry.params)} parameters, its signature has {len(params)} and scratch"
        )
    if entry.threads not in (None, (threads, 1, 1)):
        raise BuildError("kernel-failed", f"{what}: its image wants blocks of {entry.threads} threads, Triton says {threads}")
    if (entry.cluster or (1, 1, 1)) != (kernel.blocks, 1, 1):
        raise BuildError(
            "kernel-failed", f"{what}: its image wants clusters of {entry.cluster} blocks, Triton says {kernel.blocks}"
        )
    return CompiledKernel(
        image=kernel.image,
        sha256=hashlib.sha256(kernel.image).hexdigest(),
        symbol=kernel.symbol,
        params=params,
        layout=entry.params,
        scratch_pointers=len(extra),
        shared=kernel.shared,
        threads=threads,
        cluster=(kernel.blocks, 1, 1),
        cooperative=kernel.cooperative,
    )


def capability(arch: str) -> int:
    """90 of "sm_90".  Raises ValueError."""
    if not (match := re.fullmatch(r"sm_(\d+)", arch)):
        raise ValueError(f"{arch!r} is no architecture like sm_90")
    return int(match[1])


def first_line(kind: str, text: str) -> str:
    """The line of a compiler's message that says most: the first that is no place ("at 3:4:") nor quoted source, or ptxas' own."""
    lines = [line.strip() for line in text.splitlines()]
    if told := next((line for line in lines if re.match(r"ptxas.*(error|fatal)", line)), ""):
        return f"{kind}: {told}"
    start = next((i + 1 for i, line in enumerate(lines) if line and not line.strip("^~ ")), 0)  # behind the quoted source's marker
    said = next((line for line in lines[start:] if line), lines[0] if lines else "")
    return f"{kind}: {said}"


# --- the cache ------------------------------------------------------------------------------------------------


def _name(variant: KernelVariant, arch: str, made_with: tuple[str, str]) -> str:
    """The hash of all that an image depends on.  Who chose a configuration, and why, does not matter to it."""
    return hashlib.sha256(repr((FORMAT, arch, made_with, replace(variant, selected_by=""))).encode()).hexdigest()


# --- the processes --------------------------------------------------------------------------------------------


def _compile(missing: Mapping[str, KernelVariant], arch: str, folder: Path, workers: int, tell: Tell) -> None:
    """Compile into the cache, in processes that take the next variant when they are done with one.  The first failure ends them."""
    waiting: SimpleQueue[str] = SimpleQueue()
    for name in missing:
        waiting.put(name)
    count = min(workers, len(missing))
    with tempfile.TemporaryDirectory(prefix="cgcompile-") as scratch, ExitStack() as stack:
        children = [stack.enter_context(_start(Path(scratch), arch, number)) for number in range(count)]
        pool = stack.enter_context(ThreadPoolExecutor(count))
        for child in children:
            stack.callback(child.kill)  # first of all: then nobody waits for an answer any more
        feeds = [
            pool.submit(_feed, child, waiting, missing, Path(scratch), Path(scratch) / f"{number}.log", folder, tell)
            for number, child in enumerate(children)
        ]
        for feed in wait(feeds, return_when=FIRST_EXCEPTION).done:
            feed.result()


def _start(folder: Path, arch: str, number: int) -> subprocess.Popen[str]:
    settings = {name: value for name, value in os.environ.items() if not SETTINGS.match(name)}
    with open(folder / f"{number}.log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "cgcompile.offline.compile.worker", os.fspath(folder), arch],
            env={
                **settings,
                "TRITON_CACHE_DIR": os.fspath(folder / "triton"),
                "TORCHINDUCTOR_CACHE_DIR": os.fspath(folder / "inductor"),
                "TRITON_DISABLE_LINE_INFO": "1",  # it would name the file and its lines
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def _feed(
    child: subprocess.Popen[str],
    waiting: SimpleQueue[str],
    variants: Mapping[str, KernelVariant],
    scratch: Path,
    log: Path,
    folder: Path,
    tell: Tell,
) -> None:
    """Give one process variants until none is left, and remember what it makes.  Raises kernel-failed, compiler-died."""
    assert child.stdin is not None
    assert child.stdout is not None
    while True:
        try:
            name = waiting.get_nowait()
        except Empty:
            return
        what = f"kernel {variants[name].name}"
        (scratch / name).write_bytes(pickle.dumps(variants[name]))
        try:
            child.stdin.write(name + "\n")
            child.stdin.flush()
            answer = child.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if answer.startswith("failed "):
            raise BuildError("kernel-failed", f"{what}: {answer.removeprefix('failed ')}")
        if answer != "done":
            raise BuildError("compiler-died", f"{what}: {_last_line(child, log)}")
        remember(folder / name, pickle.loads((scratch / f"{name}.kernel").read_bytes()))
        tell(what)


def _last_line(child: subprocess.Popen[str], log: Path) -> str:
    status = child.wait()
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"its compiler ended with status {status}: {lines[-1] if lines else 'it wrote nothing'}"
