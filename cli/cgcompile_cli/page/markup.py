"""Builds HTML; all text is escaped.  Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ..output import safe

VOID = frozenset({"meta", "input"})
"""HTML elements without content and end tag."""

CLOSED = frozenset({"path"})
"""SVG elements that are self-closing."""


class Html(str):
    """A string that is already markup."""

    __slots__ = ()


def text(value: object) -> Html:
    """Escapes `value` for text and quoted attributes.  Unprintable characters are escaped, too."""
    return value if isinstance(value, Html) else Html(escape(safe(value), quote=True))


def joined(parts: Iterable[object], separator: str = "") -> Html:
    """Joins the parts.  Parts that are not Html are escaped."""
    return Html(separator.join([text(part) for part in parts]))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Makes an element.  An attribute `class_` becomes class, and `_` in a name becomes `-`.  None and False omit an attribute;
    True gives one without a value."""
    words = [name]
    for key, value in attributes.items():
        spelled = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(spelled)
        elif value is not None and value is not False:
            words.append(f'{spelled}="{text(value)}"')
    begin = " ".join(words)
    if name in VOID:
        return Html(f"<{begin}>")
    if name in CLOSED:
        return Html(f"<{begin}/>")
    return Html(f"<{begin}>{joined(children)}</{name}>")
