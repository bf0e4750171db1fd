"""Writes the server's log to stderr: an event is a line of text or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

Event = Mapping[str, Any]
Tell = Callable[[Event], None]


def json_log(event: Event) -> None:
    print(json.dumps(event), file=sys.stderr, flush=True)


def text_log(event: Event) -> None:
    """Writes a line of text: `serving classifier, version 1: load 0.21 s, self-test 0.02 s`."""
    print(text_of(event), file=sys.stderr, flush=True)


def text_of(event: Event) -> str:
    model = f"{event.get('model')}, version {event.get('version')}"
    match event["event"]:
        case "listening":
            return f"listening at {event['url']}"
        case "serving":
            times = [
                f"{name.removesuffix('_seconds').replace('_', '-')} {event[name]:.2f} s"
                for name in event
                if name.endswith("_seconds")
            ]
            entries = f" ({', '.join(event['entries'])})" if "entries" in event else ""
            left_out = "".join([f"; not served: {name}: {why}" for name, why in event.get("not_served", {}).items()])
            return f"serving {model}{entries}: {', '.join(times)}{left_out}"
        case "refused":
            return f"refused {model}: {event['why']}" + (f"; hint: {event['hint']}" if "hint" in event else "")
    return f"{event['event']}: " + ", ".join([f"{name} {value}" for name, value in event.items() if name != "event"])


def one_line(error: BaseException) -> str:
    """Returns the text of an error on one line."""
    return " ".join(str(error).split())
