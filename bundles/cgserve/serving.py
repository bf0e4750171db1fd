"""`cgcompile serve`: serves a bundle, or a folder of models, until a signal ends it."""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from cgbundle.validate.bundle import checked_manifest

from .application import STOPPING, Application
from .log import json_log, text_log
from .models.model_repository import Found, identity_of, scan
from .settings import ServeError, Settings
from .transport.access import read_keys
from .transport.running import PortTaken, listen, make_server, run, url_of


def serve(path: str, settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM, then answers the accepted requests.  Raises ServeError, and a CgbundleError for an invalid
    bundle."""
    tell = json_log if settings.log == "json" else text_log
    look, essential = looker(Path(path), settings)
    keys, tls = read_access(settings)
    application = Application(look, settings, tell, keys, essential=essential)
    try:
        listening = listen(settings.host, settings.port)
    except PortTaken as error:
        raise ServeError(str(error), "give another --port; 0 takes a free one") from None
    tell({"event": "listening", "url": url_of(listening, "https" if tls else "http"), "torch": "torch" in sys.modules})
    server = make_server(application.app, stopping=STOPPING, **tls)
    application.stop = lambda: setattr(server, "should_exit", True)
    run(server, [listening])
    if application.failure is not None:
        raise application.failure


def looker(path: Path, settings: Settings) -> tuple[Callable[[], Found], bool]:
    """Returns a function that finds the bundles at `path`, and whether `path` is a single bundle, without which a server ends.
    Raises ServeError, and a CgbundleError if `path` is neither a bundle nor a folder."""
    if path.is_dir() and not os.path.exists(path / "manifest.json"):
        if settings.name:
            raise ServeError("--name is for a bundle; the models of a folder have the names of their folders", "leave --name out")
        if settings.options.tokenizer is not None:
            raise ServeError(
                "--tokenizer is for a bundle", "in a folder, put tokenizer.json and tokenizer_config.json beside each bundle"
            )
        if settings.options.adapters or settings.adapter_root is not None:
            raise ServeError("--adapter and --adapter-root are for a bundle", "serve the bundle of the model by itself")
        return partial(scan, path), False
    manifest = checked_manifest(str(path))
    bundles: Found = {}

    def look() -> Found:
        with suppress(FileNotFoundError):  # the bundle is being replaced: the loaded one continues to serve
            bundles[settings.name or manifest.name] = {1: (path, identity_of(path))}
        return bundles

    return look, True


def read_access(settings: Settings) -> tuple[tuple[bytes, ...], dict[str, Any]]:
    """Returns the API keys, and uvicorn's options for TLS.  Raises ServeError."""
    try:
        keys = read_keys(settings.keys) if settings.keys is not None else ()
        if settings.certificate is None and settings.private_key is None:
            return keys, {}
        if settings.certificate is None or settings.private_key is None:
            raise ServeError("--tls-cert and --tls-key belong together", "give both, or neither")
        for path in (settings.certificate, settings.private_key):
            path.read_bytes()  # the error of the next line does not name the missing file
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.certificate, settings.private_key)
    except ssl.SSLError:
        text = f"{settings.certificate}: no PEM certificate that belongs to the key {settings.private_key}"
        raise ServeError(text, "openssl x509 -in FILE -noout -text shows a certificate") from None
    except OSError as error:
        raise ServeError(f"{error.filename}: {error.strerror}", "name a file that can be read") from None
    except ValueError as error:
        raise ServeError(str(error), "--api-key-file has a key in each line") from None
    return keys, {"ssl_certfile": settings.certificate, "ssl_keyfile": settings.private_key}
