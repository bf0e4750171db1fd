"""Times of calls and of their steps, as a table and as a Chrome trace."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from threading import Lock, get_ident
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

from ..format.file_names import FORWARD
from ..format.schema import EntrySpec, Manifest, Program

CALL = "call"


class Span(NamedTuple):
    """An interval in seconds of one clock; `track` is "GPU", or a thread."""

    name: str
    start: float
    end: float
    track: str


class Row(NamedTuple):
    """The number of spans of one name, with total, minimum and maximum seconds. `track` is CPU or GPU."""

    name: str
    track: str
    times: int
    seconds: float
    least: float
    most: float


class Profile:
    """The times of the calls inside `with program.profile() as profile:`.

    `spans` are in the order in which they ended.  `print` shows a table with a row for calls and a row for each step, in
    microseconds.  Steps on a GPU are timed with events.  A call is timed on the CPU, which does not wait for the GPU if the inputs
    are on the GPU.
    """

    GPU = "GPU"
    """The track of spans that the driver's events have timed; spans of the CPU have their thread's number."""

    def __init__(self, title: str, watch: Callable[[Profile | None], None]) -> None:
        """`watch` starts reports to a profile, and ends them with None."""
        self.title, self._watch = title, watch
        self.spans: list[Span] = []
        self._lock = Lock()
        self._begun: dict[int, float] = {}

    def __enter__(self) -> Profile:
        self._watch(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._watch(None)

    def add(self, name: str, start: float, end: float, track: str = "") -> None:
        """Adds a span, in seconds of `time.perf_counter`."""
        with self._lock:
            self.spans.append(Span(name, start, end, track or f"thread {get_ident()}"))

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `run`, so that each call adds a span of this name to the profile."""

        def timed(*arguments: Any) -> Any:
            start = perf_counter()
            result = run(*arguments)
            self.add(name, start, perf_counter())
            return result

        return timed

    def begin(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the first step of a call in this thread."""

        def begun(*arguments: Any) -> Any:
            self._begun[get_ident()] = perf_counter()
            return run(*arguments)

        return begun

    def end(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the last step of a call in this thread."""

        def ended(*arguments: Any) -> Any:
            result = run(*arguments)
            start = self._begun.pop(get_ident(), None)
            if start is not None:
                self.add(CALL, start, perf_counter())
            return result

        return ended

    def rows(self) -> list[Row]:
        """A row for each name, calls first, then steps in the order in which they first ended."""
        by_name: dict[str, list[Span]] = {CALL: []}
        for span in self.spans:
            by_name.setdefault(span.name, []).append(span)
        rows = []
        for name, spans in by_name.items():
            times = [span.end - span.start for span in spans]
            if times:
                track = self.GPU if spans[0].track == self.GPU else "CPU"
                rows.append(Row(name, track, len(times), sum(times), min(times), max(times)))
        return rows

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the spans as a Chrome trace (the Trace Event Format's complete events), for chrome://tracing and Perfetto."""
        first = min([span.start for span in self.spans], default=0.0)
        tracks = sorted({span.track for span in self.spans})
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": self.title}}]
        for number, track in enumerate(tracks):
            events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": track}})
        for span in sorted(self.spans, key=lambda span: span.start):
            micros = {"ts": round((span.start - first) * 1e6, 3), "dur": round((span.end - span.start) * 1e6, 3)}
            events.append({"ph": "X", "cat": "cgbundle", "name": span.name, "pid": 1, "tid": tracks.index(span.track), **micros})
        with open(path, "w") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def __repr__(self) -> str:
        return f"<cgbundle profile of {self.title!r}: {len(self.spans)} spans>"

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("", "on", "times", "mean us", "least", "most", "total ms")]
        for row in self.rows():
            micros = [f"{1e6 * seconds:.1f}" for seconds in (row.seconds / row.times, row.least, row.most)]
            name = row.name if row.name == CALL else f"  {row.name}"
            lines.append((name, row.track, str(row.times), *micros, f"{1e3 * row.seconds:.2f}"))
        if len(lines) == 1:
            return f"no call of {self.title} was made"
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = []
        for name, track, *numbers in lines:
            cells = [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)]
            texts.append("  ".join([name.ljust(widths[0]), track.ljust(widths[1]), *cells]))
        return "\n".join(texts)


def step_names(manifest: Manifest, entry: EntrySpec, program: Program) -> list[str]:
    """A name for each step of a program: `graph graph-1 [batch=8]`, `copy from the GPU [batch=8]`."""
    prefix, names = "" if entry.name == FORWARD else f"{entry.name} ", []
    sizes = ", ".join([f"{dimension.name}={size}" for dimension, size in zip(entry.dimensions, program.key, strict=False)])
    for step in program.steps:
        if step.kind == "copy":
            source, target = program.values[step.inputs[0]].memory, program.values[step.outputs[0]].memory
            name = f"copy {'to' if source == 'host' else 'from' if target == 'host' else 'on'} the GPU"
        else:
            name = f"{step.kind} {manifest.regions[step.region].name}"
        names.append(f"{prefix}{name}{f' [{sizes}]' if sizes else ''}")
    return names
