"""A process that compiles kernels: `python -m cgcompile.offline.compile.worker FOLDER ARCH`, one variant after another.

Each line on its standard input is the name of a file in FOLDER that holds a pickled `KernelVariant`; it answers with one line: "done"
when NAME.kernel beside it holds what was made (`compiling.Kernel`, pickled), or "failed REASON", and then it ends.  What Triton
prints goes to standard error.

Triton, 3.6 and 3.7: `triton.compile`, `ASTSource(fn, signature, constexprs, attrs)`, `GPUTarget`, `JITFunction`, `CUDAOptions`, and
the fields of a kernel's metadata that `_kernel` reads.  Without a GPU they work as long as the target is given and no driver is
asked for.  torch 2.11 to 2.13: `torch._inductor.runtime.triton_helpers`, for the kernels that Inductor writes.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sys
from pathlib import Path
from typing import Any, TextIO

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDAOptions
from triton.compiler import ASTSource

from ..lowered import KernelVariant
from .kernels import KernelImage, capability, first_line

FILE = "<kernel>"
"""Where every kernel's source stands, as far as Triton can see: no path of this machine that could get into an image."""

INDUCTOR = ("triton_helpers", "libdevice", "tl_math", "tl_extra")
"""Names that Inductor's kernels use; importing torch for them takes seconds, so it is not done for a kernel without."""


def main(folder: str, arch: str) -> None:
    """Answer until standard input ends, or the parent ends this process."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # triton prints what ptxas says
    for line in sys.stdin:
        name = line.strip()
        variant: KernelVariant = pickle.loads((Path(folder) / name).read_bytes())
        _answer(variant, Path(folder) / f"{name}.kernel", arch, answers)


def _answer(variant: KernelVariant, result: Path, arch: str, answers: TextIO) -> None:
    try:
        kernel = compile_variant(variant, arch)
    except Exception as error:
        answers.write(f"failed {first_line(type(error).__name__, str(error))}\n")
        raise
    result.write_bytes(pickle.dumps(kernel))
    answers.write("done\n")


def compile_variant(variant: KernelVariant, arch: str) -> KernelImage:
    """Compile one variant for `arch` ("sm_90").  Raises what Triton raises, and ValueError for an option that it would not heed."""
    options: dict[str, Any] = {"num_warps": variant.warps, "num_stages": variant.stages, **dict(variant.options)}
    if unknown := sorted(set(options) - set(CUDAOptions.__dataclass_fields__)):
        raise ValueError(f"triton {triton.__version__} has no option {unknown[0]}")
    function = define(variant)
    names = [name for name, _ in variant.signature]
    source = ASTSource(
        function,
        dict(variant.signature),
        dict(variant.constants),
        {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability(arch), 32), options=options)
    return _kernel(made)


def define(variant: KernelVariant) -> Any:
    """The variant's function as a triton.JITFunction; its source is where `inspect` looks, though in no file."""
    scope: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "cgcompile_kernel"}
    if any(name in variant.source for name in INDUCTOR):
        from torch._inductor.runtime import triton_helpers  # here: imports torch
        from triton.language import extra

        scope |= {
            "triton_helpers": triton_helpers,
            "libdevice": triton_helpers.libdevice,
            "tl_math": triton_helpers.math,
            "tl_extra": extra,
        }
    # without a time stamp, linecache keeps an entry that is no file
    linecache.cache[FILE] = (len(variant.source), None, variant.source.splitlines(keepends=True), FILE)
    exec(compile(variant.source, FILE, "exec"), scope)
    return triton.jit(scope[variant.name])


def _kernel(made: Any) -> KernelImage:
    found = made.metadata
    return KernelImage(
        image=made.asm["cubin"],
        symbol=found.name,
        shared=found.shared,
        tensor_columns=getattr(found, "tmem_size", None) or 0,
        warps=found.num_warps,
        blocks=found.num_ctas,
        global_scratch=found.global_scratch_size,
        profile_scratch=found.profile_scratch_size,
        cooperative=found.launch_cooperative_grid,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
