"""`raises`: pytest.raises for an error of the catalogue, by its code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cgbundle.errors import CgbundleError


@contextmanager
def raises(expected: str | type[Exception], match: str | None = None) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """As `pytest.raises`; a text is the code that an error of ours must have, and `match` is then for its message or its hint."""
    if not isinstance(expected, str):
        with pytest.raises(expected, match=match) as caught:
            yield caught
        return
    with pytest.raises(CgbundleError) as caught:
        yield caught
    error = caught.value
    assert error.code == expected, f"{error.code}: {error}"
    assert match is None or any(re.search(match, text) for text in (str(error), error.hint)), f"{error}\nhint: {error.hint}"
