"""Rules about what makes eager PyTorch give another result at every call: a bundle would have the first one for ever."""

from __future__ import annotations

from collections.abc import Iterable

from cgbundle.format.schema import Finding

from ..transforms.error_bounds import error_bounds
from ..transforms.prepared import Prepared
from .context import NOTE, REFUSE, RuleContext, finding

UNUSED = "none: calls with other values gave the same; a bundle does without"


def python_random(context: RuleContext) -> Iterable[Finding]:
    """Random numbers that forward() draws from Python or NumPy: `random.random()`, `numpy.random.rand()`, a `default_rng`.

    What it looks for: generators whose state a call moves, the global ones and those that the model holds; then calls with other
    numbers, those at either end of their range too.
    Why CUDA forbids it: a replay runs no Python, and torch.export makes the number a constant of its program.
    Effect: no bundle can be built: it would have the number of its export in every call.  Numbers that change no result (layerdrop,
    outside of training) are only noted.
    Fix: draw with torch (`torch.rand(())`), which gives fresh numbers at every call; or pass the number as an input.
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
    """The time, which forward() reads: `time.time()`, `time.perf_counter()`, `datetime.now()`.

    What it looks for: calls of these in the model's own code; then calls with the clock put forward.
    Why CUDA forbids it: a replay runs no Python, and torch.export makes the time a constant of its program.
    Effect: no bundle can be built: it would have the time of its export in every call.  Where no result depends on it, as where a
    model times itself, it is only noted.  `datetime` cannot be put forward, and is refused.
    Fix: pass the time as an input; read it outside of forward() where it is only shown.
    Source: torch.export runs Python once, while it traces; model/nondeterminism.
    """
    for obstacle in context.obstacles("clock-read"):
        yield finding(
            "clock-read", REFUSE, obstacle.message, obstacle, "a bundle would have the time of its build in every call",
            "pass the time as an input; where it is only shown, read it outside of forward()",
        )  # fmt: skip
    for obstacle in context.obstacles("unused-clock"):
        yield finding("clock-read", NOTE, f"{obstacle.message}, which changes no result", obstacle, UNUSED, "none needed")


def unrepeatable_result(context: RuleContext) -> Iterable[Finding]:
    """A model that gives other results for the same inputs, torch's random numbers being the same.

    What it looks for: two calls in eager PyTorch on the CPU whose results differ by more than rounding does.
    Why CUDA forbids it: a bundle gives the same every time, and nothing says which of the results is right.
    Effect: no bundle can be built.
    Fix: take out what is no input: memory that nothing wrote (`torch.empty`), random bytes of the system (`uuid`, `secrets`, an
    unseeded `default_rng()`), the order of a set; or pass it as an input.
    Source: model/nondeterminism.
    """
    for obstacle in context.obstacles("unrepeatable-result"):
        yield finding(
            "unrepeatable-result", REFUSE, obstacle.message, obstacle, "a bundle would have one of them for ever",
            "take out what is no input (torch.empty, an unseeded generator, the order of a set), or pass it as one",
        )  # fmt: skip


def earlier_calls(context: RuleContext) -> Iterable[Finding]:
    """Results that depend on earlier calls: an attribute that one call sets from its input's values and a later call reads, a
    counter in Python, a global.

    What it looks for: a model that was just made, in a process that has not called it, is called with inputs that the export has
    not seen, A, B and A again at every int_key, then at all in reverse order.  Every call is compared with the exported program.
    Why CUDA forbids it: a replay runs no Python.  What earlier calls left in Python is what they left at the build.
    Effect: no bundle can be built.  An attribute that depends on shapes, dtypes or weights alone changes no result, and builds.
    Fix: compute the value in every call, or keep it in a buffer: `self.register_buffer(name, torch.zeros(()))`, and write to that.
    A model that draws its first parameters in its first call, as gpytorch's ApproximateGP does, is called once before the build.
    Source: model/nondeterminism/fresh_process.py and pipeline/sequences.py.
    """
    for obstacle in context.obstacles("earlier-calls"):
        yield finding(
            "earlier-calls", REFUSE, obstacle.message, obstacle, "a bundle would have the value of its build in every call",
            "compute it in every call, or register a buffer for it and write to that; where the first call sets the model up, "
            "call it once before the build, at the end of model()",
        )  # fmt: skip


def widened_bound(prepared: Prepared) -> Iterable[Finding]:
    """An output that may differ from eager PyTorch by more than its dtype's bound, as eager PyTorch itself is less exact.

    What it looks for: eager PyTorch again, with float32 inputs a rounding step off; on a GPU also a second time, and without TF32.
    Why it matters: the proof of a bundle compares with that bound (`cgcompile inspect` shows it): a wider one catches less.
    Effect: information.  A result that is a small difference of large numbers, or that rounds inside, has no more digits than that.
    Fix: none needed; build the model in a wider dtype where the digits matter.
    Source: transforms/error_bounds.py.
    """
    for bound in error_bounds(prepared):
        if bound.widened:
            message = f"{bound.title}: compared with eager PyTorch up to {bound.bound:.1e} instead of {bound.widened:.1e}"
            yield finding(
                "widened-bound", NOTE, message, None,
                "eager PyTorch differs from itself by a quarter of that: inputs a rounding step off, or a GPU again", "none needed",
            )  # fmt: skip
