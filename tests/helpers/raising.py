"""`raises`: pytest.raises for an error of the catalogue, by its code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cgbundle.errors import CgbundleError


@contextmanager
def raises(expected: str | type[Exception], match: str | None = None) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """As `pytest.raises`; a text is the code that an error of ours must have."""
    if not isinstance(expected, str):
        with pytest.raises(expected, match=match) as caught:
            yield caught
        return
    with pytest.raises(CgbundleError, match=match) as caught:
        yield caught
    assert caught.value.code == expected, f"{caught.value.code}: {caught.value}"
