"""`inspect` for a bundle of CUDA graphs that another program captured: the graphs, and the tensors of `cgbundle.attach`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgbundle.format.archive import Archive
from cgbundle.format.table import Table
from cgbundle.validate.engine import decode_key

from .. import summary
from ..output import count, first_rows, table

if TYPE_CHECKING:
    from cgbundle.format.schema import Engine, Manifest

    from ..output import Field


def overview(path: str, manifest: Manifest) -> list[Field]:
    """Returns the fields for text output."""
    engine, origin = _engine_of(manifest), manifest.provenance
    graphs = [(repr(key), count(nodes, "node")) for key, nodes in _graphs(path, engine)]
    inputs, outputs = [
        [(row.name, row.dtype, list(row.shape)) for row in engine.tensors if row.memory == memory] for memory in ("inputs", "arena")
    ]
    return [
        ("bundle", f"{manifest.name}, format {manifest.version}, {summary.bulk(manifest)}"),
        ("target", f"{manifest.target.kind} {manifest.target.arch}, to run: {driver(manifest.target.driver)}"),
        ("graphs", table(("", ">"), first_rows(graphs))),
        ("tensors", table(("", "", ""), first_rows(inputs)) if inputs else "none"),
        ("gives", table(("", "", ""), first_rows(outputs)) if outputs else "none"),
        ("memory", summary.memory(manifest)),
        ("verified", "by a fresh process, bit for bit" if engine.verified else "no: attach it with unverified=True"),
        ("signed", summary.signed(path)),
        ("built", f"{origin.created} from {origin.source}"),
        ("with", ", ".join([f"{name} {version}" for name, version in origin.versions])),
        ("on", origin.machine),
        ("attach", f"graphs = cgbundle.attach({path!r}, tensors); graphs[{_first_key(engine)!r}].replay()"),
    ]


def plain(path: str, manifest: Manifest) -> dict[str, Any]:
    """Returns the object for `--json`: the stored manifest, and values derived from it."""
    import json

    from cgcompile.bundle import manifest_text

    engine = _engine_of(manifest)
    return {
        "path": path,
        "bytes": manifest_text.bundle_bytes(manifest),
        "graphs": [{"key": list(key) if isinstance(key, tuple) else key, "nodes": nodes} for key, nodes in _graphs(path, engine)],
        "verified": engine.verified,
        "manifest": json.loads(manifest_text.encode(manifest)),
    }


def driver(number: int) -> str:
    """Formats a driver version, such as 13000.  Graphs of another program need exactly this version."""
    return f"CUDA driver {number // 1000}.{number % 1000 // 10}, no other"


def _engine_of(manifest: Manifest) -> Engine:
    assert manifest.engine is not None  # checked by the command
    return manifest.engine


def _first_key(engine: Engine) -> Any:
    return decode_key(engine.graphs[0].key, "engine.graphs[0].key")


def _graphs(path: str, engine: Engine) -> list[tuple[Any, int]]:
    """Returns the key and the number of nodes of every graph."""
    bundle = Archive(path)
    return [
        (decode_key(graph.key, graph.file), Table(bundle.data(graph.file), graph.file).counts["nodes"]) for graph in engine.graphs
    ]
