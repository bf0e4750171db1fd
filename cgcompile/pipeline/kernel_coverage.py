"""Checks the rule of cross-compiled bundles that every operation must be lowered to Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cgbundle.format.schema import Finding, IntKey

from ..checks.findings import merged_findings
from ..targets.architectures import arch
from ..transforms.prepared import Prepared


def operators_without_kernel(
    prepared: Prepared, placements: Mapping[IntKey, Mapping[str, str]], sizes: Mapping[str, tuple[int, ...]], target: str
) -> tuple[Finding, ...]:
    """Returns the findings of the rule "operator-without-kernel" for `target`, a cross-compiled architecture.

    Returns () in a process that sees a GPU, where it cannot check.  The build's workers report such an operation later.
    """
    if torch.cuda.device_count():
        return ()
    from ..offline.lower import coverage  # late: Inductor's tables take seconds to import, and only cross-compiling needs them

    by_key = {
        key: coverage.operators_without_kernel(program, placements.get(key, {}), arch(target))
        for key, program in prepared.programs.distinct
    }
    return merged_findings(by_key, sizes)
