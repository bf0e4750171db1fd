"""The texts of errors for a path that a server does not have, and for a method that a path does not have."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request

LISTED = "GET / lists the models and their paths"


def text_of(request: Request, error: HTTPException) -> str:
    """Returns the text for an error of Starlette's routes."""
    path = request.url.path
    if error.status_code == 404:
        return f"no path {path}; {LISTED}"
    if error.status_code == 405:
        allowed = sorted({method.strip() for method in (error.headers or {}).get("Allow", "").split(",")} - {"HEAD"})
        return f"{path}: the method {request.method} is not allowed; use {' or '.join(allowed)}"
    return error.detail
