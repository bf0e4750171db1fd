"""HTML by construction: whatever text goes in comes out as text.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ..output import safe

VOID = frozenset({"meta", "input"})
"""Elements of HTML without content or end."""

CLOSED = frozenset({"path"})
"""Elements of SVG that are closed at once."""


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def text(value: object) -> Html:
    """`value` as text, also inside a quoted attribute: nothing in it is markup, and what is not printable is escaped."""
    return value if isinstance(value, Html) else Html(escape(safe(value), quote=True))


def joined(parts: Iterable[object], between: str = "") -> Html:
    """The parts one after the other; those that are no Html are text."""
    return Html(between.join([text(part) for part in parts]))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element.  An attribute `class_` is called class; `_` in a name stands for `-`.
    None and False leave an attribute out; True is one without a value."""
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
