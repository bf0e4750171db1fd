"""Finds the user's code: the file and line of an error, a frame or a node."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.fx import Node

from ..errors import ModelError
from ..util.model_file import closest, not_python

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The folder of the compiler."""

MODELS = os.path.join(OURS, "language_models", "")
"""The folder of models that belong to cgcompile.  The compiler treats their code as a user's."""


def is_ours(filename: str) -> bool:
    """Returns whether a file belongs to the compiler, but not to its models."""
    return filename.startswith(OURS) and not filename.startswith(MODELS)


def user_line(error: BaseException, label: str) -> str:
    """Returns `model.py:12`, the innermost line of the traceback in the user's code, or "".  If an installed package raised the
    error: `model.py:12: transformers/models/x.py:34`, the user's line and that of the package."""
    frames = [frame for frame in reversed(traceback.extract_tb(error.__traceback__)) if is_user_file(frame.filename)]
    if not frames:
        return ""
    inner = f"{shown(os.path.abspath(frames[0].filename)) if os.path.exists(frames[0].filename) else label}:{frames[0].lineno}"
    if not INSTALLED.match(frames[0].filename):
        return inner
    caller = next((frame for frame in frames if not INSTALLED.match(frame.filename)), None)
    return f"{f'{shown(os.path.abspath(caller.filename))}:{caller.lineno}' if caller else label}: {inner}"


def package_of(error: BaseException) -> str:
    """Returns the package, such as `transformers`, of the innermost frame outside of torch and the compiler.  Returns "" if that
    frame is not in an installed package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(frame.filename):
            installed = INSTALLED.match(frame.filename)
            return re.split(r"[/\\.]", frame.filename[installed.end() :])[0] if installed else ""
    return ""


@cache
def is_user_file(filename: str) -> bool:
    """Returns whether a file belongs to the user or to an installed package.  False for torch, the compiler, the standard library,
    and generated code."""
    library = os.path.dirname(os.__file__)
    torch_home = os.path.dirname(os.path.abspath(torch.__file__))
    full = os.path.abspath(filename)
    if filename.startswith("<") or is_ours(full) or full.startswith(torch_home + os.sep):
        return False
    return not full.startswith(library + os.sep) or "site-packages" in full


def first_line(error: BaseException) -> str:
    """Returns the first line of an error with text, without the C++ file and line."""
    lines = [LIBRARY_SOURCE.sub(" ", line).strip() for line in text_of(error).splitlines()]
    return next(filter(None, lines), "no message")


def text_of(error: BaseException) -> str:
    """Returns the text of an exception, whose class may be the user's."""
    with suppress(Exception):
        return str(error)
    return "no text: its __str__ raises"


def can_be_asked(value: object) -> bool:
    """Returns whether the class and the attributes of an object can be read without an exception.  The class may be the user's."""
    with suppress(Exception), plain_errors():
        isinstance(value, int), callable(value), hasattr(value, "__dict__") and vars(value)
        return True
    return False


PASSED_ON = (KeyboardInterrupt, GeneratorExit)
"""Exceptions that do not come from the model's code, and are not converted."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Converts exceptions of the user's code inside this context to standard ones.  This applies to classes of the user, classes
    that are not an Exception (SystemExit), and exceptions whose `str()` raises.  The new class has the same name and text, and a
    standard base class."""
    try:
        yield
    except PASSED_ON:
        raise
    except BaseException as error:
        if _is_standard(error):
            raise
        base = next((base for base in BASES if isinstance(error, base)), RuntimeError)
        plain = type(type(error).__name__, (base,), {"__module__": "builtins"})
        replacement = plain(text_of(error)).with_traceback(error.__traceback__)
        replacement.__notes__ = list(getattr(error, "__notes__", ()))  # `_hint` shows the last one
        raise replacement from error


def _is_standard(error: BaseException) -> bool:
    """Returns whether an exception is of a package in HANDLED, and its `str()` does not raise."""
    kind = type(error)
    with suppress(Exception):
        str(error)
        return isinstance(error, Exception) and kind.__module__.partition(".")[0] in HANDLED
    return False


BASES = (ValueError, TypeError, IndexError, AssertionError)
"""Standard base classes of converted exceptions.  All other exceptions become RuntimeError."""

HANDLED = frozenset({"builtins", "torch", "cgcompile", "cgbundle", "sympy", "triton"})
"""Packages whose exceptions are not converted."""


def here() -> tuple[str, str]:
    """Returns (file:line, source line) of the user's code that is running, or ("", "")."""
    frame = _user_frame()
    return ("", "") if frame is None else line_of(frame.f_code.co_filename, frame.f_lineno)


def line_of(file: str, line: int) -> tuple[str, str]:
    """Returns (file:line, source line) of a user's file."""
    return f"{shown(file)}:{line}", linecache.getline(file, line).strip()


def user_frame() -> str:
    """Returns the frame of the user's code that is running, as text of a traceback, or ""."""
    frame = _user_frame()
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f'File "{file}", line {line}, in {frame.f_code.co_name}\n    {linecache.getline(file, line).strip()}'


def _user_frame() -> FrameType | None:
    """Returns the innermost frame of the user's code that the compiler called.  Callers of the compiler do not count."""
    innermost: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if innermost is not None and is_ours(frame.f_code.co_filename):
            return innermost
        if innermost is None and is_user_file(frame.f_code.co_filename):
            innermost = frame
        frame = frame.f_back
    return None


def user_place(error: BaseException) -> tuple[str, str]:
    """Returns (file:line, source line) of the innermost frame of the user's code in an error's traceback, or ("", "")."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(frame.filename):
            return f"{shown(frame.filename)}:{frame.lineno}", (frame.line or "").strip()
    return "", ""


LIBRARY_SOURCE = re.compile(r'(?:\s*\bat )?"?(?:/|\.\./)[^\s"]*\.(?:cpp|cc|cu|cuh|h)"?:\d+[:,.]?\s*')
"""Matches `/pytorch/aten/src/x.cpp:12: ` and ` at "/pytorch/c10/x.cpp":12, `: files on the machine that built torch."""

STRING = re.compile(r"""'[^']*'|"[^"]*"|#.*""")
"""Matches strings and comments.  `whole` ignores their brackets."""

PAIRS = {"(": ")", "[": "]", "{": "}"}
"""The closing bracket of each opening bracket."""

INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
"""The start of the path of an installed package's file: the path of the environment, which bundles must not hold."""


def shown(file: str) -> str:
    """Returns the path of a user's file for messages and bundles.  It is `transformers/models/x.py` for an installed package, and
    relative if the file is below the current directory."""
    if installed := INSTALLED.match(file):
        return file[installed.end() :]
    near = os.path.relpath(file) if os.path.isabs(file) else file
    return file if near.startswith("..") else near


def place(node: Node | None) -> tuple[str, str]:
    """Returns (file:line, source line) of the user's code that a node comes from, or ("", "")."""
    return next(((f"{shown(file)}:{line}", whole(code.strip())) for file, line, code in _frames_of(node)), ("", ""))


def called_from(node: Node | None) -> str:
    """Returns ", called from model.py:12", the user's line, if a node comes from an installed package, else ""."""
    return _caller([(file, int(line)) for file, line, _ in _frames_of(node)])


def called_by(error: BaseException) -> str:
    """Like `called_from`, for the innermost frame of the user's code in a traceback."""
    frames = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    return _caller([(file, line) for file, line in frames if is_user_file(file)])


def called_here() -> str:
    """Like `called_from`, for the running code."""
    frames: list[tuple[str, int]] = []
    frame = _user_frame()
    while frame is not None and not is_ours(frame.f_code.co_filename):
        if is_user_file(frame.f_code.co_filename):
            frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _caller(frames)


def _caller(frames: Sequence[tuple[str, int]]) -> str:
    """Returns ", called from model.py:12" if the innermost of the user's `frames`, the first one, is in an installed package, else
    ""."""
    if not frames or not INSTALLED.match(frames[0][0]):
        return ""
    return next((f", called from {shown(file)}:{line}" for file, line in frames if not INSTALLED.match(file)), "")


def _frames_of(node: Node | None) -> list[tuple[str, str, str]]:
    """Returns (file, line, source line) of the frames of the user's code that created a node, the innermost first."""
    trace = (node.meta.get("stack_trace") or "") if node is not None else ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', trace)
    return [frame for frame in reversed(frames) if is_user_file(frame[0])]


def whole(code: str) -> str:
    """Returns the first line of a statement, with `...` for its other lines: `x = f(` becomes `x = f(...)`."""
    opened: list[str] = []
    for char in STRING.sub("", code):
        if char in PAIRS:
            opened.append(PAIRS[char])
        elif opened and char == opened[-1]:
            opened.pop()
    return f"{code}...{''.join(reversed(opened))}" if opened else code


def definition(function: Callable[..., Any]) -> str:
    """Returns `model.py:12`, the place of the definition of a user's function, or ""."""
    return defined(function)[0]


def defined(function: Callable[..., Any]) -> tuple[str, str]:
    """Returns (file:line, source line) of the definition of a user's function, or ("", "")."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    user = code is not None and is_user_file(code.co_filename)
    return line_of(code.co_filename, code.co_firstlineno) if user and code is not None else ("", "")


def call_user(function: Callable[..., Any], what: str, label: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the user's code.  Converts an exception to a ModelError of one line with the place in the code."""
    try:
        with plain_errors():
            return function(*args, **kwargs)
    except SyntaxError as error:
        raise not_python(error, label) from None
    except ModelError:  # from cgcompile.language_models, already one line
        raise
    except Exception as error:
        if isinstance(error.__cause__, SystemExit):
            text = f"{user_line(error, label) or label}: {what} ended the program: SystemExit: {first_line(error)}"
            raise ModelError("source-invalid", text, 'put the code of the script under `if __name__ == "__main__":`') from error
        message = f"{user_line(error, label) or label}: {what} failed: {type(error).__name__}: {first_line(error)}"
        raise ModelError("source-invalid", message, _hint(error)) from error


def _hint(error: Exception) -> str:
    """Returns the last note of an exception, or a hint for its class."""
    if notes := getattr(error, "__notes__", None):
        return str(notes[-1])
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install {error.name.partition('.')[0]!r} in this environment, or put it into the folder of the model file"
    if "CUDA" in text_of(error) and not torch.cuda.is_available():
        return "no GPU is here: make tensors on the CPU; the model and its inputs are moved to where they are needed"
    if package := package_of(error):
        cause = f"{package} raised this exception for the arguments of the call"
        return f"{cause}: import the file in Python and call it there, for the whole traceback"
    return "it is the model's own code that raised this: import the file in Python and call it there, for the whole traceback"


def mismatch(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Describes the arguments that match no parameter, with the closest name, and the missing arguments.  Returns "" if the call
    matches `signature`."""
    try:
        signature.bind(*args, **kwargs)
        return ""
    except TypeError as error:
        bind_error = str(error)
    formals = signature.parameters.values()
    by_place = [formal.name for formal in formals if formal.kind in (formal.POSITIONAL_ONLY, formal.POSITIONAL_OR_KEYWORD)]
    by_name = [formal.name for formal in formals if formal.kind in (formal.KEYWORD_ONLY, formal.POSITIONAL_OR_KEYWORD)]
    single = [formal for formal in formals if formal.kind not in (formal.VAR_POSITIONAL, formal.VAR_KEYWORD)]
    placed, named = by_place[: len(args)], [name for name in kwargs if name in by_name]
    missing = [formal.name for formal in single if formal.default is formal.empty and formal.name not in (*placed, *named)]
    free = [name for name in by_name if name not in (*placed, *named)]
    has_var_keyword = any(formal.kind is formal.VAR_KEYWORD for formal in formals)
    problems = [
        _unknown_name(name, missing, free) for name in kwargs if name not in by_name and not (has_var_keyword and not missing)
    ]
    problems += [f"{name!r} is given by position and by name" for name in placed if name in named]
    if len(args) > len(by_place) and not any(formal.kind is formal.VAR_POSITIONAL for formal in formals):
        problems.append(f"{len(args)} arguments by position, and it takes {len(by_place)}")
    problems += [f"{name!r} is missing" for name in missing]
    return ", ".join(problems) or bind_error


def _unknown_name(name: str, missing: Sequence[str], free: Sequence[str]) -> str:
    """Returns the text for a name that no parameter has, with the closest name of a missing or other free parameter."""
    suggestion = closest(name, missing) or closest(name, free)
    return f"no parameter is called {name!r}" + (f" (did you mean {suggestion!r}?)" if suggestion else "")
