"""Draws a benchmark as one self-contained SVG, which follows the reader's light or dark mode.  Pure functions.

Bars show medians; whiskers show the smallest and the largest value.  Cold starts and memory have a linear axis.  Times of int_keys
can differ much, so every int_key has its own axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from .protocol import PHASES
from .report import Benchmark, Way

WIDTH, LEFT, RIGHT = 800, 130, 120
"""Pixels: width of the picture, left of the bars, right of the bars."""

ROW, BAR, GAP = 22, 14, 34
"""Pixels: distance of bars, height of a bar, space above a panel."""

CHARACTER = 6.5
"""Approximate width of a character, in pixels."""

STYLE = """
  svg { font: 12px system-ui, sans-serif; background: #fff; } text { fill: #222; } .dim { fill: #666; } .title { font-weight: 600; }
  .whisker { stroke: #222; } .start { fill: #8a8f98; } .import { fill: #e0a13c; } .load { fill: #4c8dd6; } .call { fill: #3fa66b; }
  .ready { fill: #b58bd8; } .bundle { fill: #3fa66b; } .baseline { fill: #4c8dd6; }
  @media (prefers-color-scheme: dark) {
    svg { background: #16181c; } text { fill: #e6e6e6; } .dim { fill: #9aa0a8; } .whisker { stroke: #e6e6e6; }
  }
"""

MEANINGS = {
    "start": "interpreter", "import": "imports", "load": "load", "call": "first call", "ready": "until all int_keys are ready",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A bar of `pieces`, (CSS class, length), with a whisker from `low` to `high` in the panel's unit, followed by `text`."""

    name: str
    pieces: tuple[tuple[str, float], ...]
    low: float
    high: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Bars under a title.  `legend`: (CSS class, meaning) of their pieces."""

    title: str
    bars: tuple[Bar, ...]
    legend: tuple[tuple[str, str], ...] = ()


def svg(report: Benchmark) -> str:
    """Returns the SVG's text."""
    shown_panels = [panel for panel in panels(report) if panel.bars]
    body: list[str] = []
    top = 46.0
    for panel in shown_panels:
        top = _draw(panel, top, body)
    machine = report.machine
    where = machine.gpu or f"{machine.processor}, {machine.cores} cores"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions if name == "torch")
    head = [
        _text(10, 20, f"{report.name}, {report.target}: bundle beside its baselines", "title"),
        _text(10, 38, ", ".join(filter(None, [where, versions, machine.date])), "dim"),
    ]
    lines = "\n".join([*head, *body])
    height = int(top) + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">\n'
        f"<title>{_safe(report.name)}: benchmark</title>\n<style>{STYLE}</style>\n{lines}\n</svg>\n"
    )


def panels(report: Benchmark) -> list[Panel]:
    """Returns the panels: cold starts, calls by kind and int_key, memory."""
    all_panels = [
        Panel(
            title="cold start: seconds from process start",
            bars=tuple([_start(way) for way in report.ways if way.starts]),
            legend=tuple(MEANINGS.items()),
        )
    ]
    titles = {"call": "time of a call", "device": "GPU time of a call", "dispatch": "CPU time of a call"}
    for kind in report.kinds():
        for key, name in zip(report.keys, report.names, strict=True):
            timings = [(way, timing) for way in report.ways if (timing := way.timing(kind, key))]
            bars = [_bar(way, [second * 1e6 for second in timing.seconds], "us") for way, timing in timings]
            all_panels.append(Panel(title=f"{titles[kind]}, {name}: microseconds", bars=tuple(bars)))
    used = [(way, way.memory) for way in report.ways if way.memory]
    if any(memory.device >= 0 for _, memory in used):
        bars = [_bar(way, [memory.device / 2**20], "MiB") for way, memory in used if memory.device >= 0]
        all_panels.append(Panel(title="memory on the GPU beside the context: MiB", bars=tuple(bars)))
    bars = [_bar(way, [memory.resident / 2**20], "MiB") for way, memory in used]
    return [*all_panels, Panel(title="resident memory of the process: MiB", bars=tuple(bars))]


def _start(way: Way) -> Bar:
    pieces = tuple([(phase, way.phase(index)) for index, phase in enumerate(PHASES)])
    firsts = way.firsts()
    return Bar(
        name=way.name, pieces=pieces, low=min(firsts), high=max(firsts),
        text=f"{_digits(median(firsts))} s, all {_digits(median(way.readies()))} s",
    )  # fmt: skip


def _bar(way: Way, values: Sequence[float], unit: str) -> Bar:
    middle = median(values)
    kind = "bundle" if way.name == "bundle" else "baseline"
    return Bar(name=way.name, pieces=((kind, middle),), low=min(values), high=max(values), text=f"{_digits(middle)} {unit}")


def _draw(panel: Panel, top: float, body: list[str]) -> float:
    """Adds the panel's elements below `top` and returns its bottom."""
    top += GAP - 10
    body.append(_text(10, top, panel.title, "title"))
    left = float(LEFT)
    if panel.legend:
        top += 18
        for kind, meaning in panel.legend:
            body.append(f'<rect class="{kind}" x="{left:.0f}" y="{top - 9:.0f}" width="10" height="10"/>')
            body.append(_text(left + 14, top, meaning, "dim"))
            left += 30 + CHARACTER * len(meaning)
    longest = max([max(bar.high, sum(length for _, length in bar.pieces)) for bar in panel.bars])
    scale = (WIDTH - LEFT - RIGHT) / (longest or 1.0)
    top += 8
    for bar in panel.bars:
        body.append(_text(10, top + BAR - 2, bar.name))
        x = float(LEFT)
        for kind, length in bar.pieces:
            width = length * scale
            body.append(f'<rect class="{kind}" x="{x:.1f}" y="{top:.0f}" width="{width:.1f}" height="{BAR}"/>')
            x += width
        low, high, middle = LEFT + bar.low * scale, LEFT + bar.high * scale, top + BAR / 2
        if high - low >= 1:
            body.append(f'<path class="whisker" d="M{low:.1f} {middle - 3:.0f}v6M{low:.1f} {middle:.0f}H{high:.1f}m0 -3v6"/>')
        body.append(_text(max(x, high) + 6, top + BAR - 2, bar.text, "dim"))
        top += ROW
    return top


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    class_attribute = f' class="{kind}"' if kind else ""
    return f'<text{class_attribute} x="{x:.0f}" y="{y:.0f}">{_safe(text)}</text>'


def _safe(text: str) -> str:
    """Escapes `text` for XML and removes unprintable characters, because names come from a bundle."""
    return escape("".join([c for c in text if c.isprintable()]))


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
