"""Options for loading and serving models; all versions of all models share them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock


class Refused(Exception):
    """A version is not served; the text says why.  `hint`: a remedy, or "".  `memory`: whether the reason is a lack of memory."""

    def __init__(self, why: str, hint: str = "", *, memory: bool = False) -> None:
        super().__init__(why)
        self.hint, self.memory = hint, memory


class MemoryBudget:
    """The maximum bytes of all loaded bundles together; None is no limit."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit, self._taken = limit, 0
        self._lock = Lock()  # versions are loaded in parallel

    def take(self, size: int) -> None:
        """Reserves memory for a bundle before it is loaded.  Raises Refused if the limit is exceeded."""
        with self._lock:
            if self._limit is not None and self._taken + size > self._limit:
                mib = [f"{number / (1 << 20):.1f} MiB" for number in (size, self._limit, self._limit - self._taken)]
                raise Refused(f"the bundle needs {mib[0]}; {mib[2]} of --memory {mib[1]} are free", "raise --memory", memory=True)
            self._taken += size

    def give_back(self, size: int) -> None:
        """Releases the memory of a closed bundle."""
        with self._lock:
            self._taken -= size


@dataclass(frozen=True, slots=True)
class Options:
    """`wait`: milliseconds that a request waits for others; `limit`: maximum waiting or open requests of a model; `seconds`:
    deadline of a request, for a language model until its first token.  `devices`: GPUs that get a copy of every model; () is the
    first GPU, or the CPU for a CPU bundle.  `threads`: CPU threads of a call.  `turns`: maximum tokens per request in one call of a
    language model.  `tokenizer`: the folder of the tokenizer; None for `tokenizer_beside`.  `memory`: the budget of all bundles.
    `adapters`: names and folders of LoRA adapters of a language model."""

    wait: float = 2.0
    limit: int = 1024
    seconds: float = 30.0
    devices: tuple[int, ...] = ()
    threads: int | None = None
    turns: int = 8
    tokenizer: Path | None = None
    adapters: tuple[tuple[str, Path], ...] = ()
    memory: MemoryBudget = field(default_factory=MemoryBudget)


def tokenizer_beside(bundle: Path, name: str) -> Path | None:
    """Returns the first of these folders with a tokenizer.json, or None: `X` beside `X.cgb`; `name` beside the bundle, which a
    build from a GGUF file writes; the bundle's parent folder; for `model.cgb` also the model's folder above it."""
    places = [bundle.with_suffix("")] if bundle.suffix else []
    if name not in ("", ".", "..") and "/" not in name:
        places.append(bundle.parent / name)
    places.append(bundle.parent)
    if bundle.name == "model.cgb":
        places.append(bundle.parent.parent)
    return next((place for place in places if (place / "tokenizer.json").is_file()), None)
