"""Verifies a bundle: the build fails if a tensor differs from eager PyTorch by more than its bound.

A fresh process, which has only the runtime, loads a staged bundle and replays the self-test (`cgbundle/self_test.py`).  A bundle
for another machine is interpreted instead (`offline/proof.py`).  `transforms/error_bounds.py` defines the bound of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cgbundle.format.file_names import FORWARD, NEAR_TIES, SELF_TEST, WAIVER, is_exact, self_test_tensors
from cgbundle.format.schema import Dimension, EntrySpec, Finding, IntKey, Manifest, Proof, SelfTest
from cgbundle.self_test import fresh, key_text, name_key
from cgbundle.tensors.comparison import nearest

from ..errors import BuildError
from ..transforms.error_bounds import ErrorBound
from ..transforms.near_ties.judge import Verdict, indices_text
from ..transforms.prepared import Prepared
from ..util.scratch import scratch_folder
from ..util.tolerance import Difference
from .choices import read_outputs, verdict, with_near_ties
from .self_test import KeySelfTest, read_self_test, replace_self_tests, with_expected

REPORT = "nothing was published; please report this model"

STANDALONE = f"{REPORT}; without --standalone torch's own code runs"

TURNED = f"near ties do not explain the difference: return the floats from which it is computed, or allow it with --allow {WAIVER}"


def accepted(
    dimensions: Sequence[Dimension],
    bounds: Sequence[ErrorBound],
    key_differences: Mapping[IntKey, Sequence[Difference]],
    allow: Sequence[str],
    what: str,
    hint: str = REPORT,
    entry: str = FORWARD,
) -> tuple[float, ...]:
    """Checks the differences from eager PyTorch at every int_key, and returns the bounds that the bundle stores: those of `bounds`.
    If `allow` permits integers that rounding changes, their bound is the largest share that differed.  In the error, `what` says
    what differs.  Raises proof-failed for the first tensor that exceeds its bound."""
    stored_bounds = [error_bound.bound for error_bound in bounds]
    for key, differences in key_differences.items():
        for index, (bound, difference) in enumerate(zip(bounds, differences, strict=True)):
            if difference.error <= bound.bound:
                continue
            if bound.exact and bound.rounded and WAIVER in allow and difference.error <= 1:
                stored_bounds[index] = max(stored_bounds[index], difference.error)
                continue
            by = "" if bound.exact else f"by {difference.error:.1e}, allowed {bound.bound:.1e}: "
            raise BuildError(
                "proof-failed",
                f"int_key {key_text(dimensions, key, entry)}: {what} from eager PyTorch: {bound.title}: {by}{difference.text}",
                TURNED if bound.exact and bound.rounded else hint,
            )
    return tuple(stored_bounds)


def unproved(key: IntKey, bounds: Sequence[ErrorBound]) -> Proof:
    """Returns the proof of an int_key that was not compared yet."""
    bound = max((limit.bound for limit in bounds), default=0.0)
    return Proof(key=key, method="none", tolerance=bound)


def measured(
    key: IntKey, method: Literal["replay", "interpret", "none"], differences: Sequence[Difference], bounds: Sequence[float]
) -> Proof:
    """Returns the proof of an int_key, with the differences from eager PyTorch."""
    errors = tuple([difference.error for difference in differences])
    error, bound = nearest(zip(errors, bounds, strict=True))
    return Proof(key=key, method=method, error=error, tolerance=bound, errors=errors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The self-tests of all entries with measured proofs.  `index_remarks` says which indices differ from eager PyTorch."""

    self_tests: tuple[SelfTest, ...]
    index_remarks: str


def replay(
    stage: Path,
    manifest: Manifest,
    bounds: Sequence[Sequence[ErrorBound]],
    allow: Sequence[str],
    prepared: Sequence[Prepared] = (),
) -> Replayed:
    """Replays the self-test of every entry, and measures the proofs.  `bounds` has the bounds of each entry.  Raises proof-failed.

    If a self-test has eager PyTorch's results, its proofs get the differences that this replay measured.  The proofs of a self-test
    with recorded results keep their errors.  They get the distance of the replay from the recording in addition.  With `prepared`
    (by entry), different indices are accepted if the floats at these indices are within tolerance.  The self-test then holds the
    results of eager PyTorch for the bundle's indices.
    """
    with scratch_folder() as scratch:
        outputs = scratch / "outputs.safetensors"
        answer = fresh(str(stage), outputs=str(outputs) if prepared else "")
        if "error" in answer:
            raise BuildError("proof-failed", f"the fresh process refused the bundle: {answer['error']}", answer["hint"])
        if answer["torch_imported"]:
            raise BuildError(
                "proof-failed", "the fresh process imported torch, so its replay does not show that the bundle works without torch"
            )
        rows: list[dict[str, Any]] = answer["results"]
        for row in answer.get("donations", ()):
            if not row["passed"]:
                text = f"{row['title']}: a call on the donated output differs from a call on its copy: {row['text']}"
                raise BuildError("proof-failed", text, REPORT)
        self_tests, remarks, chosen = [], [], {}
        for number, (entry, entry_bounds) in enumerate(zip(manifest.entries, bounds, strict=True)):
            entry_rows = [row for row in rows if row["entry"] == entry.name]
            verdicts = _verdicts(stage, manifest, entry, entry_bounds, entry_rows, prepared[number], outputs) if prepared else {}
            self_test = _examined(
                manifest, entry, entry_bounds, entry_rows, allow, {key: ruling.differences for key, (_, ruling) in verdicts.items()}
            )
            if prepared:
                key_tests = [read_self_test(stage / SELF_TEST, manifest, entry, proof.key) for proof in self_test.proofs]
                self_test = replace(
                    self_test, bounds=with_near_ties(self_test.bounds, prepared[number], key_tests, entry_bounds, manifest.weights)
                )
            self_tests.append(self_test)
            remarks.append(indices_text(entry_bounds, [ruling.indices for _, ruling in verdicts.values()]))
            if verdicts:
                chosen[entry.name] = [self_test for self_test, _ in verdicts.values()]
    if chosen:
        replace_self_tests(stage / SELF_TEST, chosen)
    return Replayed(self_tests=tuple(self_tests), index_remarks="; ".join(filter(None, remarks)))


def _verdicts(
    stage: Path,
    manifest: Manifest,
    entry: EntrySpec,
    bounds: Sequence[ErrorBound],
    rows: Sequence[dict[str, Any]],
    prepared: Prepared,
    outputs: Path,
) -> dict[IntKey, tuple[KeySelfTest, Verdict]]:
    """Returns, by int_key of an entry, the verdicts for index selections, and the self-tests for these selections.  Omits int_keys
    that are within their bounds, or that no selections explain."""
    verdicts = {}
    for proof, row in zip(entry.self_test.proofs, rows, strict=True):
        if all(tensor["error"] <= bound.bound for tensor, bound in zip(row["tensors"], bounds, strict=True)):
            continue
        results = read_outputs(outputs, manifest, entry, proof.key)
        self_test = read_self_test(stage / SELF_TEST, manifest, entry, proof.key)
        ruling = verdict(prepared, self_test, results, bounds, manifest.weights) if results else None
        if ruling:
            verdicts[proof.key] = with_expected(self_test, ruling.expected, prepared, manifest.weights), ruling
    return verdicts


def _examined(
    manifest: Manifest,
    entry: EntrySpec,
    bounds: Sequence[ErrorBound],
    rows: Sequence[dict[str, Any]],
    allow: Sequence[str],
    judged: Mapping[IntKey, Sequence[Difference]],
) -> SelfTest:
    """Returns the self-test of an entry with the results `rows` of its replay.  `judged` has the differences of the int_keys with a
    verdict."""
    self_test = entry.self_test
    if self_test.expected == "eager":
        if WAIVER not in manifest.allowed:  # the interpreter may have stored bounds for near ties
            bounds = [replace(limit, bound=max(limit.bound, old)) for limit, old in zip(bounds, self_test.bounds, strict=True)]
        by_key = {
            proof.key: judged.get(proof.key)
            or [Difference(error=tensor["error"], text=tensor["text"]) for tensor in row["tensors"]]
            for proof, row in zip(self_test.proofs, rows, strict=True)
        }
        hint = STANDALONE if manifest.target.kind == "cpu" and not manifest.target.torch else REPORT
        kept = accepted(entry.dimensions, bounds, by_key, allow, "the bundle's outputs differ", hint, entry.name)
        return replace(self_test, bounds=kept, proofs=tuple([measured(key, "replay", diff, kept) for key, diff in by_key.items()]))
    proofs = []
    for proof, row in zip(self_test.proofs, rows, strict=True):
        for tensor in row["tensors"]:
            if not tensor["passed"]:
                where = f"int_key {name_key(entry, proof.key)}"
                text = f"{where}: the replay differs from the recording: {tensor['title']}: {tensor['text']}"
                raise BuildError("proof-failed", text, REPORT)
        distance = max((tensor["error"] for tensor in row["tensors"]), default=0.0)
        proofs.append(replace(proof, method="replay", distance=distance))
    return replace(self_test, proofs=tuple(proofs))


def mismatches(manifest: Manifest, entry: EntrySpec) -> tuple[Finding, ...]:
    """Returns a finding for every integer tensor that may differ: a waived mismatch, or near ties."""
    findings = []
    for index, (tensor, bound) in enumerate(zip(self_test_tensors(manifest, entry), entry.self_test.bounds, strict=True)):
        if not (is_exact(tensor.dtype) and bound):
            continue
        differs = max([proof.errors[index] for proof in entry.self_test.proofs if proof.errors], default=0.0)
        if differs:
            rule, message = WAIVER, f"{tensor.title}: up to {differs:.1%} of the values differ from eager PyTorch's"
            effect = "where floats are nearly equal, rounding can change the result"
            fix = "return the floats from which they are computed"
        else:
            rule = NEAR_TIES
            message = f"{tensor.title}: up to {bound:.1%} of the indices could be replaced by an equally good index"
            effect, fix = "on another processor rounding may select that one, and `verify --run` allows it", ""
        findings.append(Finding(rule=rule, severity="note", message=message, effect=effect, fix=fix))
    return tuple(findings)
