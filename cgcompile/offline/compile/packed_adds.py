"""A defect of ptxas kept out of kernel images: of `add.s16x2` with an immediate, where only one half of the result is used, ptxas
12.8 and 12.9 drop the immediate (triton-lang/triton#11581; sm_90 and later, the first with packed adds).  LLVM makes such adds of
indices that fit in 16 bits: the padding of a convolution read its neighbours.

Triton, 3.6 and 3.7: `knobs.runtime.add_stages_inspection_hook`, called as `_hook` says, and a stage "ptx" that returns text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping
from typing import Any

from triton import knobs

Stage = Callable[..., Any]
"""What a compiler's stage makes of the text before it, and of the kernel's metadata."""

PACKED = re.compile(r"^([ \t]*)add\.[su]16x2[ \t]+(%\w+),[ \t]*(%\w+),[ \t]*(%\w+|-?\w+);", re.MULTILINE)

KEY = "split_packed_adds"

SPLIT = """{0}{{
{0}.reg .b16 %half<4>;
{0}.reg .b32 %second;
{0}mov.b32 %second, {3};
{0}mov.b32 {{%half0, %half1}}, {2};
{0}mov.b32 {{%half2, %half3}}, %second;
{0}add.s16 %half0, %half0, %half2;
{0}add.s16 %half1, %half1, %half3;
{0}mov.b32 {1}, {{%half0, %half1}};
{0}}}"""


def split_packed_adds(ptx: str) -> str:
    """The same PTX, with each packed 16-bit add as two adds.  Raises ValueError for one that is written in a way not known here."""
    split = PACKED.sub(lambda match: SPLIT.format(*match.groups()), ptx)
    if left := re.search(r"^.*add\.[su]16x2.*$", split, re.MULTILINE):
        raise ValueError(f"a packed add that cannot be split: {left[0].strip()}")
    return split


def install() -> None:
    """Every kernel that this process compiles from here on goes through `split_packed_adds`."""
    knobs.runtime.add_stages_inspection_hook = _hook


def _hook(*compiler: Any) -> tuple[str, str] | None:
    """Triton calls it without arguments for (key, hash), which go into the names of its own cache, and then with a backend, its
    stages by name, which may be replaced, and three more."""
    if not compiler:
        return KEY, KEY
    stages: MutableMapping[str, Stage] = compiler[1]
    ptx_stage = stages["ptx"]
    stages["ptx"] = lambda source, metadata: split_packed_adds(ptx_stage(source, metadata))
    return None
