"""Errors of the runtime: classes that callers catch, with a code per cause (catalogue.py). An error is one line (what is wrong,
where, expected and actual); `hint` says what to do. `exit_code`: 1 for a bad bundle, 2 for the call, the machine or the path."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any, ClassVar

    from .catalogue import Cause


class CgbundleError(Exception):
    """Base class of all errors of cgbundle and cgcompile.  `code` is the code of the error, `hint` says what to do.  `str()` is the
    message without the hint; a traceback shows both."""

    escaped: ClassVar[bool] = False
    """Whether messages quote a bundle or a call. Then unprintable characters are escaped, and long messages are cut."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(one_line(message) if self.escaped else message)
        cause = self._causes()[code]
        self.code, self.exit_code, self.hint = code, cause.exit_code, hint or cause.hint
        if self.hint:
            self.add_note(f"hint: {self.hint}")  # a traceback shows it

    @classmethod
    def _causes(cls) -> Mapping[str, Cause]:
        """The causes of errors of this class, by code."""
        from .catalogue import CATALOGUE  # no load needs it

        return CATALOGUE

    @property
    def kind(self) -> str:
        """The code, spelled like a class: FileDamaged."""
        return self.code.title().replace("-", "")

    @property
    def where(self) -> str:
        """The start of the message, if it is a place: `model.py:12`, `gpt.cgb`, `sizes`, a field of a manifest.  Else ""."""
        return place(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, str(self), self.hint)


class BundleError(CgbundleError):
    """The path has no valid bundle, or a bundle that this runtime cannot read."""

    escaped = True


class MachineError(CgbundleError):
    """This machine cannot run the bundle, or a library or the driver failed."""

    escaped = True


class OutOfMemory(MachineError):
    """The device has too little free memory."""


class CallError(CgbundleError):
    """The call does not match the bundle's signature, or is not allowed in the current state."""

    escaped = True


class ProgramClosed(CallError):
    """The program was closed."""


class SessionBusy(CallError):
    """Two threads used one session at once."""


class StateMissing(CallError, KeyError):
    """The model has no such state."""

    __str__ = Exception.__str__  # `KeyError.__str__` would show the message in quotes


class EntryMissing(CallError, KeyError):
    """The bundle has no such entry."""

    __str__ = Exception.__str__


def did_you_mean(name: str, known: Collection[str]) -> str:
    """ " (did you mean decode?)", or "" without a similar name."""
    from difflib import get_close_matches  # only errors need it

    return "".join([f" (did you mean {near}?)" for near in get_close_matches(name, known, 1, 0.6)])


def place(message: str) -> str:
    """The start of a message up to ": ", if it is one word or an existing path; else ""."""
    where, colon, _ = message.partition(": ")
    if not colon or not any(map(str.isspace, where)):
        return where if colon else ""
    path, line, number = where.rpartition(":")
    return where if os.path.lexists(path if line and number.isdigit() else where) else ""


LONGEST = 2000  # characters of a message that quotes a bundle


def one_line(message: str) -> str:
    """The message, printable and shortened."""
    shown = _cut(message)
    if shown.isprintable():
        return shown
    return _cut("".join([c if c.isprintable() else " " if c in "\n\t" else c.encode("unicode_escape").decode() for c in shown]))


def _cut(message: str) -> str:
    return message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} ... {message[-LONGEST // 4 :]}"
