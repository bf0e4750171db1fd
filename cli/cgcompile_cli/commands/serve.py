"""`cgcompile serve`: serves bundles over HTTP, without torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import UsageError
from ..options import Threads

UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
"""Exponents of 2 by the first letter of the unit."""


def serve(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A bundle, or a folder of models: <model>/<version>/model.cgb.", show_default=False),
    ],
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="The address of the server; 0.0.0.0 for all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="N", help="The port; 0 uses a free port, and shows it.")
    ] = 8000,
    grpc_port: Annotated[
        int | None,
        typer.Option("--grpc-port", min=0, max=65535, metavar="N", help="Also serve gRPC at this port; 0 uses a free port."),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="The model's name for clients. Default: the bundle's name.")
    ] = "",
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="FOLDER", help="The folder with tokenizer.json. Default: beside the bundle."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=FOLDER", help="A LoRA adapter and its name as a model; may be repeated."),
    ] = None,
    adapter_root: Annotated[
        Path | None,
        typer.Option("--adapter-root", metavar="FOLDER", help="Clients may load adapters of this folder. Default: none."),
    ] = None,
    devices: Annotated[
        str, typer.Option("--devices", metavar="0,1", help="GPUs, each with a copy of every model. Default: one GPU.")
    ] = "",
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Maximum memory of all loaded bundles, e.g. 40GiB. Default: no limit.")
    ] = "",
    threads: Threads = None,
    queue: Annotated[
        int, typer.Option("--queue", min=1, metavar="N", help="Maximum number of waiting or open requests of a model.")
    ] = 1024,
    deadline: Annotated[
        float,
        typer.Option("--deadline", min=0.001, metavar="S", help="Seconds for a request; for a text, until its first token."),
    ] = 30.0,
    wait: Annotated[
        float, typer.Option("--wait", min=0, metavar="MS", help="Time that a request waits for others to share its call.")
    ] = 2.0,
    turns: Annotated[
        int, typer.Option("--turns", min=1, metavar="N", help="Tokens of each text in one call, if no request waits.")
    ] = 8,
    largest: Annotated[
        int, typer.Option("--largest", min=1, metavar="MIB", help="Maximum size of a request with tensors. gRPC: half of it.")
    ] = 64,
    poll: Annotated[float, typer.Option("--poll", min=0.01, metavar="S", help="Seconds between checks for new versions.")] = 1.0,
    ready: Annotated[
        Literal["all", "any"],
        typer.Option("--ready", metavar="all|any", help="Whether all models must serve before the server is ready."),
    ] = "any",
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="File with one key per line: requests need one of them.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="The certificate for HTTPS, PEM.")] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="The private key of the certificate, PEM.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option("--cors", metavar="ORIGIN", help="Origin of pages that may send requests; may be repeated.")
    ] = None,
    log: Annotated[
        Literal["text", "json"], typer.Option("--log", metavar="text|json", help="Format of the log on stderr.")
    ] = "text",
) -> None:
    """Serve a bundle, or a folder of them, over HTTP.

    Language models that `cgcompile build FOLDER` wrote speak OpenAI's
    protocol: /v1/chat/completions, /v1/completions, /v1/models. All other
    bundles speak the Open Inference Protocol: /v2/models/NAME/infer. If
    their inputs are tokens, and a tokenizer lies beside them, they also
    answer at /v1/embeddings, /v1/rerank or /v1/classify. If a bundle has
    several entries, each is a model, NAME.ENTRY. One process serves all.
    --grpc-port 8001 serves the Open Inference Protocol over gRPC, too.
    Other routes are /health, /metrics and /v2/health/ready.

    In a folder the highest version of each model serves. The server loads
    a new version beside the old one, replays its self-test, and switches to
    it between two calls.

    A language model that was built with --adapters also serves LoRA
    adapters of PEFT: requests name one as their model.

    \b
    cgcompile serve classifier.cgb
    cgcompile serve Qwen3-0.6B.cgb --tokenizer ~/models/Qwen3-0.6B
    cgcompile serve Qwen3-0.6B.cgb --adapter sql=adapters/sql
    cgcompile serve models/ --host 0.0.0.0 --devices 0,1 --log json
    """
    _check_extra("serve", ("starlette", "uvicorn", "prometheus_client", "tokenizers", "jinja2"))
    if grpc_port is not None:
        _check_extra("grpc", ("grpc", "google.protobuf"))
    from cgserve.models.options import MemoryBudget, Options
    from cgserve.serving import serve as run
    from cgserve.settings import ServeError, Settings

    if tokenizer is not None and not (Path(tokenizer) / "tokenizer.json").is_file():
        raise UsageError(f"--tokenizer {tokenizer}: no tokenizer.json", "give the folder that the model was built from")
    if adapter_root is not None and not adapter_root.is_dir():
        raise UsageError(f"--adapter-root {adapter_root}: no such folder")
    options = Options(
        wait=wait, limit=queue, seconds=deadline, devices=_devices(devices), threads=threads, turns=turns,
        adapters=_adapters(adapter or ()), tokenizer=None if tokenizer is None else Path(tokenizer),
        memory=MemoryBudget(_size(memory) if memory else None),
    )  # fmt: skip
    settings = Settings(
        host=host, port=port, grpc_port=grpc_port, name=name, poll=poll, largest=largest << 20, ready=ready, keys=api_key_file,
        certificate=tls_cert, private_key=tls_key, origins=tuple(cors or ()), adapter_root=adapter_root, log=log, options=options,
    )  # fmt: skip
    try:
        run(path, settings)
    except ServeError as error:
        raise UsageError(str(error), error.hint) from None


def _check_extra(extra: str, packages: Sequence[str]) -> None:
    """Raises UsageError if a package of an extra is missing."""
    for package in packages:
        try:
            installed = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:  # the parent package is missing
            installed = False
        if not installed:
            problem = f"serving needs {package}, of the extra {extra}, which is not installed"
            raise UsageError(problem, f"pip install 'cgcompile[{extra}]'")


def _devices(text: str) -> tuple[int, ...]:
    """Parses `0,1` to (0, 1).  Raises UsageError."""
    if text and not all(number.isdigit() for number in text.split(",")):
        raise UsageError(f"--devices {text}: expected numbers of GPUs, as in 0,1")
    return tuple([int(number) for number in text.split(",") if number])


def _adapters(texts: Sequence[str]) -> tuple[tuple[str, Path], ...]:
    """Parses `NAME=FOLDER` to (NAME, FOLDER).  Raises UsageError."""
    pairs: list[tuple[str, Path]] = []
    for text in texts:
        name, _, folder = text.partition("=")
        if not name or not folder:
            raise UsageError(f"--adapter {text}: expected a name and a folder, as in sql=adapters/sql")
        if name in dict(pairs):
            raise UsageError(f"--adapter {text}: another adapter has this name")
        pairs.append((name, Path(folder)))
    return tuple(pairs)


def _size(text: str) -> int:
    """Parses `40GiB` to bytes.  Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(?:i?B)?|B)?", text)
    if match is None:
        raise UsageError(f"--memory {text}: expected a size, as in 500MiB or 40GiB")
    return int(float(match[1]) * (1 << UNITS[match[2] or ""]))
