"""build and check: what a user of cgcompile calls.  Light: torch is imported when one of them runs."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgbundle.format.schema import Finding, Manifest

from .errors import BuildError
from .model.declared_sizes import Given
from .util.progress import Watcher, silent

MAX_KEYS = 64
"""int_keys that are built without being asked: each costs runs of the model, an exam, and on a GPU a recording."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a model is built: the keyword parameters of `build`."""

    sizes: Given
    out: str | os.PathLike[str] | None
    target: str
    strict: bool
    waive: tuple[str, ...]
    lower: str
    specialize: str
    recorder: str
    prove: str
    host_ops: tuple[str, ...]
    force: bool
    max_keys: int
    progress: Watcher


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A published bundle, its manifest, and the seconds that each stage took."""

    path: Path
    manifest: Manifest
    seconds: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionReport:
    """A region that a build would make.

    `operations` are operators and how often each is called, the most frequent first.  `reads` are the values that cross to it, with
    the bytes of each at the largest sizes.
    """

    name: str
    kind: str
    reason: str
    operations: tuple[tuple[str, int], ...]
    reads: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What `check` found.

    `target` is "cuda" or "cpu"; `sizes` those that the report is about, `assumed` the dimensions that the user gave no size for.
    `regions` are those that a build would make, `returned` what crosses back to the caller.  Both are empty, and `unpartitioned`
    says why, where nothing can be built.
    """

    name: str
    target: str
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    assumed: tuple[str, ...]
    findings: tuple[Finding, ...]
    regions: tuple[RegionReport, ...]
    returned: tuple[tuple[str, int], ...]
    unpartitioned: str

    @property
    def refused(self) -> bool:
        """Whether a finding stops a build."""
        return any(finding.severity == "refuse" for finding in self.findings)


@contextmanager
def _torch() -> Iterator[None]:
    """With torch, and without the warnings of export and Inductor about their own insides.  Raises extra-missing."""
    for package in ("torch", "numpy"):
        if importlib.util.find_spec(package) is None:
            raise BuildError(
                "extra-missing", f"building needs {package}, which is not installed", "pip install 'cgcompile[compile]'"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.|copyreg")
        yield


def build(
    model: Any,
    inputs: Callable[..., Any] | None = None,
    *,
    sizes: Given = (),
    out: str | os.PathLike[str] | None = None,
    target: str = "auto",
    strict: bool = False,
    waive: Sequence[str] = (),
    lower: str = "inductor",
    specialize: str = "size",
    recorder: str = "auto",
    prove: str = "interpret",
    host_ops: Sequence[str] = (),
    force: bool = False,
    max_keys: int = MAX_KEYS,
    progress: Watcher | None = None,
) -> Built:
    """Builds a bundle and publishes it at `out` (default: the model's name + `.cgb` in the current folder).

    `model`: path of a model.py, `package.module:attribute`, path of a saved .pt2, or a module (then `inputs` makes its example
    inputs).  `sizes`: of the declared dimensions, e.g. [1, 8, 32] or {"batch": [1, 8], "seq": [128]}.  `target`: auto, cuda, sm_90
    and its kind (a GPU that need not be here), or cpu.  `strict`: findings that put operations on the host are errors.  `waive`:
    rules whose findings are accepted; the manifest names them (what is refused now cannot be waived).

    `lower`: eager, inductor or max-autotune; the cpu target has inductor alone.  `specialize`: "size" lowers every int_key for
    itself, "shared" all at once with dynamic shapes (fewer images, slower kernels).  `recorder`: capture (a GPU that is here),
    trace (without), or auto.  `prove`: interpret or none, for a bundle whose GPU is not here; all others are replayed.
    `host_ops`: operators that are kept on the host between two graphs, e.g. "mylib::op".  `force`: replace an existing bundle.
    `progress` is told what happens.

    Raises a CgbundleError (see errors.py here and in cgbundle); nothing is published then.
    """
    options = Options(
        sizes=sizes, out=out, target=target, strict=strict, waive=tuple(waive), lower=lower, specialize=specialize,
        recorder=recorder, prove=prove, host_ops=tuple(host_ops), force=force, max_keys=max_keys, progress=progress or silent,
    )  # fmt: skip
    with _torch():
        from . import pipeline  # late: it imports torch

        return pipeline.build(model, inputs, options)


def check(
    model: Any,
    inputs: Callable[..., Any] | None = None,
    *,
    sizes: Given = (),
    target: str = "cuda",
    strict: bool = False,
    host_ops: Sequence[str] = (),
) -> Report:
    """Every obstacle between a model and a bundle, and the regions that a build would make.  Nothing is built, no GPU is needed.

    `model`, `inputs` and `sizes` as for `build`; a dimension without sizes is checked for some.  `target`: cuda, cpu, or an
    architecture such as sm_90.  `strict`: findings that put operations on the host refuse.  `host_ops`: operators that are kept on
    the host, e.g. "mylib::op".

    Raises a BuildError where the model cannot even be exported for another reason than a rule's, and for wrong arguments.
    """
    with _torch():
        from . import report  # late: it imports torch

        return report.check(model, inputs, sizes=sizes, target=target, strict=strict, host_ops=host_ops, max_keys=MAX_KEYS)
