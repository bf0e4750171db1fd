"""`raises`: pytest.raises that checks the code of a `CgbundleError`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cgbundle.errors import CgbundleError


@contextmanager
def raises(expected: str | type[Exception], match: str | None = None) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Works like `pytest.raises`. If `expected` is a text, it is the error code, and `match` must match the message or the hint."""
    if not isinstance(expected, str):
        with pytest.raises(expected, match=match) as caught:
            yield caught
        return
    with pytest.raises(CgbundleError) as caught:
        yield caught
    error = caught.value
    assert error.code == expected, f"{error.code}: {error}"
    assert match is None or any(re.search(match, text) for text in (str(error), error.hint)), f"{error}\nhint: {error.hint}"
