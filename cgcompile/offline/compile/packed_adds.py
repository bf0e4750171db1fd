"""Avoids a defect of ptxas 12.8 and 12.9 (triton-lang/triton#11581): an `add.s16x2` loses its immediate if only one half of the
result is used.  The defect affects sm_90 and later, which have packed adds.  LLVM emits such adds for indices that fit in 16 bits.
For example, a convolution read neighbours instead of padding.

Private interfaces, Triton 3.6 and 3.7: `knobs.runtime.add_stages_inspection_hook`, and a stage "ptx" that returns text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping
from typing import Any

from triton import knobs

Stage = Callable[..., Any]
"""A compiler stage: takes the previous stage's text and the kernel's metadata."""

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
    """Splits each packed 16-bit add of the PTX into two adds.  Raises ValueError for a packed add in an unknown form."""
    split = PACKED.sub(lambda match: SPLIT.format(*match.groups()), ptx)
    if unsplit := re.search(r"^.*add\.[su]16x2.*$", split, re.MULTILINE):
        raise ValueError(f"a packed add that cannot be split: {unsplit[0].strip()}")
    return split


def install() -> None:
    """Makes every later compilation of this process use `split_packed_adds`."""
    knobs.runtime.add_stages_inspection_hook = _hook


def _hook(*compiler: Any) -> tuple[str, str] | None:
    """Triton calls this hook without arguments for (key, hash), which become part of its cache keys.  Triton then calls it with a
    backend, the stages by name, and three more arguments.  The hook may replace stages."""
    if not compiler:
        return KEY, KEY
    stages: MutableMapping[str, Stage] = compiler[1]
    ptx_stage = stages["ptx"]
    stages["ptx"] = lambda source, metadata: split_packed_adds(ptx_stage(source, metadata))
    return None
