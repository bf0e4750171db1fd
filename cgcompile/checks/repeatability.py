"""Rules about results that change from call to call in eager PyTorch.  A bundle would return the first result in every call."""

from __future__ import annotations

from collections.abc import Iterable

from cgbundle.format.schema import Finding

from ..transforms.error_bounds import error_bounds
from ..transforms.prepared import Prepared
from .context import NOTE, REFUSE, RuleContext, finding

UNUSED = "none: other values gave the same results; a bundle does not read them"


def python_random(context: RuleContext) -> Iterable[Finding]:
    """Random numbers that forward() draws from Python or NumPy: `random.random()`, `numpy.random.rand()`, a `default_rng`.

    What it looks for: generators whose state changes in a call: the global ones, and those in attributes of the model.  Then the
    model is called with other numbers, also with the smallest and the largest possible number.
    Why CUDA forbids it: a replay runs no Python, and torch.export stores the number as a constant of its program.
    Effect: no bundle can be built: every call would have the number of the export.  If the numbers change no result (layerdrop,
    outside of training), it is only a note.
    Fix: draw with torch (`torch.rand(())`), which gives new numbers at every call; or pass the number as an input.
    Source: torch.export runs Python once, while it traces; model/nondeterminism.
    """
    for obstacle in context.obstacles("python-random"):
        yield finding(
            "python-random", REFUSE, obstacle.message, obstacle, "it would be the same number at every call of a bundle",
            "draw it with torch (torch.rand, torch.randn), or pass it as an input",
        )  # fmt: skip
    for obstacle in context.obstacles("unused-random"):
        yield finding("python-random", NOTE, f"{obstacle.message}, which change no result", obstacle, UNUSED, "none needed")


def clock_read(context: RuleContext) -> Iterable[Finding]:
    """A model that reads the time in forward(): `time.time()`, `time.perf_counter()`, `datetime.now()`.

    What it looks for: calls of these functions in the model's own code.  Then the model is called with the clock set forward.
    Why CUDA forbids it: a replay runs no Python, and torch.export stores the time as a constant of its program.
    Effect: no bundle can be built: every call would have the time of the export.  If no result depends on the time, it is only a
    note.  Reads through `datetime` are always refused, because the check cannot set its clock.
    Fix: pass the time as an input; if the model only displays it, read it outside of forward().
    Source: torch.export runs Python once, while it traces; model/nondeterminism.
    """
    for obstacle in context.obstacles("clock-read"):
        yield finding(
            "clock-read", REFUSE, obstacle.message, obstacle, "a bundle would have the time of its build in every call",
            "pass the time as an input; if it is only displayed, read it outside of forward()",
        )  # fmt: skip
    for obstacle in context.obstacles("unused-clock"):
        yield finding("clock-read", NOTE, f"{obstacle.message}, which changes no result", obstacle, UNUSED, "none needed")


def unrepeatable_result(context: RuleContext) -> Iterable[Finding]:
    """A model with different results for the same inputs and the same seed of torch.

    What it looks for: two calls in eager PyTorch on the CPU whose results differ by more than rounding.
    Why CUDA forbids it: a bundle has the same result every time, and the build cannot know which of the two results is right.
    Effect: no bundle can be built.
    Fix: remove what changes from call to call: uninitialized memory (`torch.empty`), random bytes of the system (`uuid`, `secrets`,
    an unseeded `default_rng()`), the order of a set; or pass the value as an input.
    Source: model/nondeterminism.
    """
    for obstacle in context.obstacles("unrepeatable-result"):
        yield finding(
            "unrepeatable-result", REFUSE, obstacle.message, obstacle, "every call of a bundle would return the same one",
            "remove other sources of values (torch.empty, an unseeded generator, the order of a set), or make them inputs",
        )  # fmt: skip


def earlier_calls(context: RuleContext) -> Iterable[Finding]:
    """Results that depend on earlier calls: an attribute that one call sets from its inputs and a later call reads, a counter in
    Python, a global variable.

    What it looks for: a new process creates the model.  It calls the model with new inputs A, B and A again at every int_key, then
    at all int_keys in reverse order.  Every call is compared with the exported program.
    Why CUDA forbids it: a replay runs no Python.  The Python state stays as it was at the build.
    Effect: no bundle can be built.  An attribute that depends only on shapes, dtypes or weights is accepted, because it changes no
    result.
    Fix: compute the value in every call, or keep it in a buffer: `self.register_buffer(name, torch.zeros(()))`.  If the model draws
    its parameters in its first call, as gpytorch's ApproximateGP does, call it once before the build.
    Source: model/nondeterminism/fresh_process.py and pipeline/sequences.py.
    """
    for obstacle in context.obstacles("earlier-calls"):
        yield finding(
            "earlier-calls", REFUSE, obstacle.message, obstacle, "a bundle would have the value of its build in every call",
            "compute it in every call, or register a buffer of its dtype and shape and write to that; if only the first call sets "
            "it, call the model once before the build, at the end of model()",
        )  # fmt: skip


def outside_effect(context: RuleContext) -> Iterable[Finding]:
    """A model that prints in forward(), appends to a global list, counts in a global variable or in an attribute of its class.

    What it looks for: calls of `print` in the model's own code, and global variables (of the files with the model's methods) and
    class attributes that a repeated call changes: numbers, lists, dicts, sets.
    Why it matters: a replay runs no Python.
    Effect: information.  Calls of a bundle return the same results, but do not print and do not change the variable.
    Fix: none needed; if another part of the program needs it, do it where the program calls the bundle.
    Source: model/nondeterminism/outside_effects.py.
    """
    for obstacle in context.obstacles("outside-effect"):
        yield finding(
            "outside-effect", NOTE, obstacle.message, obstacle, "calls of a bundle run no Python, so they do not do this",
            "none needed for the results; else do it where the program calls the bundle",
        )  # fmt: skip


def widened_bound(prepared: Prepared) -> Iterable[Finding]:
    """An output that may differ from eager PyTorch by more than its dtype's bound, because eager PyTorch itself is less exact.

    What it looks for: a second run of eager PyTorch with float32 inputs changed by a rounding step; on a GPU also a repeated run,
    and a run without TF32.
    Why it matters: the verification of a bundle uses this bound (`cgcompile inspect` shows it), and a wider bound detects fewer
    defects.
    Effect: information.  Some results have few exact digits: the small difference of two large numbers, or a result that the model
    itself rounds.
    Fix: none needed; if the digits matter, build the model in a wider dtype.
    Source: transforms/error_bounds.py.
    """
    for bound in error_bounds(prepared):
        if bound.widened:
            message = f"{bound.title}: compared with eager PyTorch up to {bound.bound:.1e} instead of {bound.widened:.1e}"
            yield finding(
                "widened-bound", NOTE, message, None,
                "two runs of eager PyTorch differ by a quarter of that (inputs changed by a rounding step, or a second GPU run)",
                "none needed",
            )  # fmt: skip
