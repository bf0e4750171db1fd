"""What torch.export says when it stops, in our words: the user's line, what is wrong, what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..errors import ModelError
from ..model.side_effects import BRANCH, BRANCH_FIX
from ..model.source import Source
from ..model.user_code import first_line, user_line, user_place

_INPUT_SIZE = r"L\['tensors'\]\[\d+\]\.size\(\)\[\d+\]"
"""How export spells the size of an input's axis."""


def constants(fixes: str) -> dict[str, str]:
    """Dimensions that export found to be constant, with the value."""
    return dict(re.findall(r"^\s*(\w+) = (\d+)\s*$", fixes, re.MULTILINE))


def explain(source: Source, error: Exception, sizes: Mapping[str, tuple[int, ...]]) -> ModelError:
    """The error for what torch.export raised; `sizes` are those of the dimensions that were dynamic."""
    text = str(error)
    fixed = constants(text)
    for name in sizes:
        if name in fixed:
            return ModelError(
                "size-excluded",
                f"{source.label}: dimension {name!r} cannot vary: the model's code fixes it to {fixed[name]}",
                f"remove what depends on the value of {name} (an if, int(), a constant in a view), or declare no such dimension",
            )
        if re.search(rf"\b{name}\b", text) and "onstraint" in text:
            lines = [line.strip(" -*") for line in text.splitlines() if re.search(rf"\b{name}\b", line)]
            line = next((line for line in lines if line.startswith("Not all values")), lines[0])
            return ModelError("size-excluded", f"{source.label}: dimension {name!r}: {re.sub(_INPUT_SIZE, name, line)}")
    if isinstance(error, GuardOnDataDependentSymNode):
        place, line = user_place(error)
        return branch(place or source.label, line)
    place = user_line(error, source.label)
    if not place:
        found = re.search(r'File "([^"]+)", line (\d+), in forward', text)
        place = f"{found[1]}:{found[2]}" if found else source.label
    return ModelError("export-failed", f"{place}: torch.export cannot take the model: {type(error).__name__}: {first_line(error)}")


def branch(where: str, line: str) -> ModelError:
    """Python branched on the value of a tensor at `where`."""
    return ModelError("branch-on-data", f"{where}: data-dependent-branch: {BRANCH}: {line}", BRANCH_FIX)
