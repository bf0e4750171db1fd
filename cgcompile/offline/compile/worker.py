"""A worker process that compiles kernels (see `util.workers`), without a GPU.  A request is a KernelVariant and an architecture.
Private interfaces, Triton 3.6 and 3.7: `triton.compile`, `ASTSource(fn, signature, constexprs, attrs)`, `GPUTarget`, `JITFunction`,
`CUDAOptions`, and the fields of a kernel's metadata that `compile_variant` reads."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDAOptions
from triton.compiler import ASTSource

from ...errors import BuildError
from ...targets import architectures
from ...util.garbage_collection import collect_seldom
from ...util.workers import serve
from ..lowered import KernelVariant
from . import packed_adds
from .kernel_source import define
from .kernels import KernelImage

FILE = "<kernel>"
"""The source path that Triton gets for every kernel, so that images contain no paths of this machine."""


def work(request: tuple[KernelVariant, str]) -> KernelImage:
    """Compiles a variant for an architecture.  Raises kernel-failed."""
    variant, arch = request
    try:
        return compile_variant(variant, arch)
    except Exception as error:
        raise BuildError("kernel-failed", f"kernel {variant.name}: {first_line(type(error).__name__, str(error))}") from error


def first_line(kind: str, text: str) -> str:
    """The most useful line of a compiler's message: ptxas's error, or the first line that is neither a position ("at 3:4:") nor
    source."""
    lines = [line.strip() for line in text.splitlines()]
    if error_line := next((line for line in lines if re.match(r"ptxas.*(error|fatal)", line)), ""):
        return f"{kind}: {error_line}"
    start = next((i + 1 for i, line in enumerate(lines) if line and not line.strip("^~ ")), 0)  # after the line of ^ and ~
    message = next((line for line in lines[start:] if line), lines[0] if lines else "")
    return f"{kind}: {message}"


def compile_variant(variant: KernelVariant, arch: str) -> KernelImage:
    """Compiles one variant for `arch` ("sm_90").  Raises Triton's errors, and ValueError for an option that Triton would ignore."""
    packed_adds.install()
    options: dict[str, Any] = {"num_warps": variant.warps, "num_stages": variant.stages, **dict(variant.options)}
    if unknown := sorted(set(options) - set(CUDAOptions.__dataclass_fields__)):
        raise ValueError(f"triton {triton.__version__} has no option {unknown[0]}")
    function = triton.jit(define(variant.source, variant.name, FILE))
    names = [name for name, _ in variant.signature]
    source = ASTSource(
        function,
        dict(variant.signature),
        dict(variant.constants),
        {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", architectures.arch(arch).capability, 32), options=options)
    kernel_metadata = compiled.metadata
    return KernelImage(
        image=compiled.asm["cubin"],
        symbol=kernel_metadata.name,
        shared=kernel_metadata.shared,
        tensor_columns=getattr(kernel_metadata, "tmem_size", None) or 0,
        warps=kernel_metadata.num_warps,
        blocks=kernel_metadata.num_ctas,
        global_scratch=kernel_metadata.global_scratch_size,
        profile_scratch=kernel_metadata.profile_scratch_size,
        cooperative=kernel_metadata.launch_cooperative_grid,
    )


if __name__ == "__main__":
    collect_seldom()
    serve(work)
