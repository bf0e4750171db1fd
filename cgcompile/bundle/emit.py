"""Writes the exported programs, and the manifest with the hashes of all files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import torch
from torch.export import ExportedProgram

from cgbundle.errors import BundleError
from cgbundle.format import file_names, schema
from cgbundle.format.archive import Archive
from cgbundle.validate import bundle as verify
from cgbundle.validate.bundle import check_self_test

from ..errors import BuildError
from ..export.programs import Programs
from ..export.torch_program import save_program, without_weights
from ..util.disk_space import size
from . import manifest_text

TRACES = ("stack_trace", "custom", "from_node")
"""Keys of a node's metadata that hold source locations."""


def write_programs(stage: Path, programs: Programs, entry: str) -> None:
    """Writes the program of an entry, or one per int_key if they differ (see `file_names.program_files`)."""
    if len(programs.distinct) == 1:
        files = {file_names.whole_program_file(entry): programs.first}
    else:
        files = {file_names.program_file(key, entry): program for key, program in programs.by_key.items()}
    for file, program in files.items():
        (stage / file).parent.mkdir(parents=True, exist_ok=True)
        write_program(stage / file, program)


def write_program(path: Path, program: ExportedProgram) -> None:
    """Writes a program for the CPU, also if its device was a GPU.  Omits its weights (see `without_weights`)."""
    bare = without_weights(program)
    with _without_traces(bare):
        save_program(bare, buffer := BytesIO())  # a buffer: torch hides the reason of a failed write to a file
    path.write_bytes(buffer.getbuffer())


@contextmanager
def _without_traces(program: ExportedProgram) -> Iterator[None]:
    """Removes source locations from the nodes inside this context, because they contain paths of the machine that builds."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    removed = [{name: node.meta.pop(name) for name in TRACES if name in node.meta} for node in nodes]
    try:
        yield
    finally:
        for node, meta in zip(nodes, removed, strict=True):
            node.meta.update(meta)


def seal(stage: Path, manifest: schema.Manifest) -> schema.Manifest:
    """Adds the rows of all files in the folder `stage` to the manifest, and writes it.  In a manifest that was sealed before,
    updates only the row of the self-test.  Then reads the bundle with the checks and limits for untrusted bundles.  Raises
    bundle-refused if the runtime would refuse it."""
    described = tuple(
        [manifest_text.describe_file(str(stage), row.path) if row.path == file_names.SELF_TEST else row for row in manifest.files]
    )
    sealed = replace(manifest, files=described or manifest_text.describe_files(str(stage)))
    try:
        _write_checked(stage, sealed)
    except BundleError as error:
        raise BuildError("bundle-refused", f"the bundle that was built: {error}") from None
    return sealed


def _write_checked(stage: Path, sealed: schema.Manifest) -> None:
    (stage / file_names.MANIFEST).write_bytes(manifest_text.encode(sealed))
    written = Archive(str(stage))
    verify.check_bundle(written)
    check_self_test(written)
    written.close()


def describe_size(stage: Path) -> str:
    """Returns the size of all files in the folder `stage` as text."""
    return size(sum(file.stat().st_size for file in stage.rglob("*") if file.is_file()))
