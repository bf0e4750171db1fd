"""What the C++ compiler defines by itself, asked once and kept: each question starts it, and all take as long as a small model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ...util.content_cache import cache_folder, cache_optional, cache_path, recall, remember
from ..instruction_sets import Level, macros
from ..requirements import compiler, described

Ask = Callable[..., dict[str, str]]
"""The macros that a compiler defines with the options that it is called with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Macros:
    """What is kept: names with what they stand for."""

    defined: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilers:
    """`plain`: the C++ compiler.  `wrapped`: what Inductor is given for it, `compiler.wrap`."""

    plain: Ask
    wrapped: Ask


def ask_compilers(wrapped: str, level: Level | None) -> Compilers:
    """`wrapped`: the path of what Inductor is given, for `level`.  Asking raises compiler-failed and cache-unsafe."""
    about = described(compiler(), "-march=native", "-v", "-E", "-x", "c++", os.devnull)
    return Compilers(
        plain=_kept(compiler(), about, "plain"), wrapped=_kept(wrapped, about, f"for {level.name}" if level else "for this one")
    )


def _kept(command: str, *about: str) -> Ask:
    @cache
    def ask(*options: str) -> dict[str, str]:
        path = None
        with cache_optional():
            path = cache_path(cache_folder(), "compiler", *about, options)
        if path is not None and (found := recall(path, Macros)) is not None:
            return dict(found.defined)
        made = macros(command, *options)
        if path is not None:
            with cache_optional():
                remember(path, Macros(defined=tuple(made.items())))
        return made

    return ask
