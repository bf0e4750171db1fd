"""Compares recordings: the kernels that they launch, and the nodes of each int_key and region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256

from cgbundle.validate.module_state import ModuleState
from cgcompile.bundle.recordings import Recording

from .bundle_files import BundleFiles, recording, table
from .differences import Difference, Row, compare_rows, unique_names
from .manifests import key_text, step_regions
from .nodes import DIGITS, IMAGE, changes, kind, place, title

Launches = Mapping[str, Counter[str]]
"""Maps a kernel's symbol and the SHA-256 of its image to the number of its launches in one call of each int_key."""

SHOWN = 3
"""Maximum number of images of a symbol that are listed."""


def launches(bundle: BundleFiles) -> Launches:
    """Counts the kernels that the bundle's recordings launch.  Raises file-damaged, table-invalid."""
    by_symbol: dict[str, Counter[str]] = {}
    for name in recording_files(bundle).values():
        view = table(bundle, name)
        for function, count in Counter(view.function).items():
            by_symbol.setdefault(view.symbols[function], Counter())[view.images[function]] += count
    return by_symbol


def same_tables(a: BundleFiles, b: BundleFiles) -> bool:
    """Returns whether two bundles have the same recordings, by their hashes."""
    hashes = [{where: bundle.files[name].sha256 for where, name in recording_files(bundle).items()} for bundle in (a, b)]
    return hashes[0] == hashes[1]


def compare_kernels(a: Launches, b: Launches) -> Iterator[Difference]:
    """Yields the kernels (symbols) that only one bundle launches, or that differ in their image or number of launches.  The kernel
    with the most launches is first."""
    for symbol in sorted({*a, *b}, key=lambda name: (-max(a.get(name, Counter()).total(), b.get(name, Counter()).total()), name)):
        mine, theirs = a.get(symbol, Counter()), b.get(symbol, Counter())
        facts = {"launches_a": mine.total(), "launches_b": theirs.total()}
        if not mine or not theirs:
            sides = [_images(counts) if counts else None for counts in (mine, theirs)]
            yield Difference(part="kernels", name=symbol, a=sides[0], b=sides[1], facts=facts)
            continue
        removed = Counter({image: number for image, number in mine.items() if image not in theirs})
        added = Counter({image: number for image, number in theirs.items() if image not in mine})
        if removed or added:
            yield Difference(part="kernels", name=symbol, field="image", a=_images(removed), b=_images(added), facts=facts)
        elif mine != theirs:
            yield Difference(part="kernels", name=symbol, a=_images(mine), b=_images(theirs), facts=facts)


def _images(counts: Counter[str]) -> str:
    """Formats launch counts: `3af2c01b9d11 (4 launches)`."""
    texts = [f"{image[:DIGITS]} ({count} launch{'' if count == 1 else 'es'})" for image, count in counts.most_common(SHOWN)]
    return ", ".join([*texts, *([f"{len(counts) - SHOWN} more images"] if len(counts) > SHOWN else [])]) or "none"


def compare_nodes(a: BundleFiles, b: BundleFiles) -> Iterator[Difference]:
    """Compares the recordings of each common int_key and region: nodes by kind, the first node that differs, and the edges."""
    theirs = recording_files(b)
    for where, name in recording_files(a).items():
        if where in theirs and a.files[name].sha256 != b.files[theirs[where]].sha256:
            yield from compare_recordings(where, recording(a, name), recording(b, theirs[where]))


def compare_recordings(where: str, a: Recording, b: Recording) -> Iterator[Difference]:
    """Yields the differences between two recordings, all with the name `where`."""
    counts = [Counter([kind(node) for node in recording.nodes]) for recording in (a, b)]
    if counts[0] != counts[1]:
        facts = {"nodes_a": counts[0].total(), "nodes_b": counts[1].total()}
        yield Difference(part="nodes", name=where, a=_kinds(counts[0]), b=_kinds(counts[1]), facts=facts)
    common = min(len(a.nodes), len(b.nodes))
    differing = [(number, node_changes) for number in range(common) if (node_changes := changes(a, b, number))]
    if differing:
        images = [number for number, node_changes in differing if [name for name, _ in node_changes] == [IMAGE]]
        first, first_changes = next((pair for pair in differing if pair[0] not in images), differing[0])
        head = f"{len(differing)} of {common} nodes differ" + (f", {len(images)} only in the kernel's image" if images else "")
        if len(a.nodes) != len(b.nodes):
            head = f"equal before node {first}" + (", except for kernel images" if images else "")
        detail = "; ".join([f"{name} {texts}" for name, texts in first_changes])
        facts = {"nodes": common, "differ": len(differing), "images": len(images), "first": first}
        yield Difference(part="nodes", name=where, note=f"{head}; node {first} ({title(a, first)}): {detail}", facts=facts)
    elif len(a.nodes) != len(b.nodes):
        side, longer = ("A", a) if len(a.nodes) > common else ("B", b)
        note = f"node {common} ({title(longer, common)}) and all later nodes: only in {side}"
        yield Difference(part="nodes", name=where, note=note, facts={"first": common})
    if a.bodies != b.bodies and counts[0] == counts[1]:
        texts = [", ".join(map(str, recording.bodies)) for recording in (a, b)]
        yield Difference(part="nodes", name=where, field="first nodes of bodies", a=texts[0], b=texts[1])
    edges = [Counter(recording.edges) for recording in (a, b)]
    if counts[0] == counts[1] and edges[0] != edges[1]:
        facts = {"edges_a": (edges[0] - edges[1]).total(), "edges_b": (edges[1] - edges[0]).total()}
        note = f"edges only in A: {facts['edges_a']}, only in B: {facts['edges_b']}"
        yield Difference(part="nodes", name=where, field="order", note=note, facts=facts)


def _kinds(counts: Counter[str]) -> str:
    """Formats node counts: `40 nodes: 38 kernel, 2 memset`."""
    return f"{counts.total()} nodes: " + (", ".join([f"{number} {name}" for name, number in counts.most_common()]) or "none")


def compare_module_states(a: Sequence[ModuleState], b: Sequence[ModuleState]) -> Iterator[Difference]:
    """Compares the data symbols of images: their names, their contents, and the addresses that the contents hold."""
    yield from compare_rows(
        "module state", *[unique_names([(state.symbol, _state(state)) for state in states]) for states in (a, b)], ordered=False
    )


def _state(state: ModuleState) -> Row:
    contents = state.contents.hex() if len(state.contents) <= 16 else f"SHA-256 {sha256(state.contents).hexdigest()[:DIGITS]}"
    return {
        "bytes": len(state.contents),
        "contents": contents,
        "addresses": tuple([f"{relocation.at}: {place(relocation.target)}" for relocation in state.relocations]),
    }


def recording_files(bundle: BundleFiles) -> dict[str, str]:
    """Returns the path of every recording, by a label of its int_key and region: `batch=8, model`."""
    engine = bundle.manifest.engine
    rows = [(f"graph {graph.key}", graph.file) for graph in engine.graphs] if engine is not None else []
    for entry in bundle.manifest.entries:
        for program in entry.programs:
            names = step_regions(bundle.manifest, program)
            steps = zip(names, program.steps, strict=True)
            rows += [(f"{key_text(entry, program.key)}, {name}", step.file) for name, step in steps if step.kind == "graph"]
    return unique_names(rows)
