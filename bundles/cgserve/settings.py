"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .models.options import Options


class ServeError(Exception):
    """The server cannot start, or had to end.  The text is one line.  `hint`: a remedy, or ""."""

    def __init__(self, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`grpc_port`: the port for gRPC, None for no gRPC.  `poll`: seconds between two checks for new versions.  `largest`: maximum
    bytes of a body with tensors.  `ready`: whether all models, or any of them, must serve before the server is ready.  `keys`: a
    file with an API key per line; if it is given, requests need a key.  `origins`: origins of browser pages that may send requests,
    `*` for all.  `adapter_root`: the folder of adapters that clients may load, None if they may load none."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    name: str = ""
    poll: float = 1.0
    largest: int = 64 << 20
    ready: Literal["all", "any"] = "any"
    keys: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    origins: tuple[str, ...] = ()
    adapter_root: Path | None = None
    log: Literal["text", "json"] = "text"
    options: Options = field(default_factory=Options)
