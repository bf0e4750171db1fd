"""How models are loaded and served: values that every version of every model shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock


class Refused(Exception):
    """A version that is not served; the text says why, `hint` what to do, or "".  `memory`: for want of memory."""

    def __init__(self, why: str, hint: str = "", *, memory: bool = False) -> None:
        super().__init__(why)
        self.hint, self.memory = hint, memory


class MemoryBudget:
    """The bytes that all loaded bundles may take together; None is no bound."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit, self._taken = limit, 0
        self._lock = Lock()  # versions are loaded side by side

    def take(self, size: int) -> None:
        """Counts a bundle that is about to be loaded.  Raises Refused where it would be too much."""
        with self._lock:
            if self._limit is not None and self._taken + size > self._limit:
                mib = [f"{number / (1 << 20):.1f} MiB" for number in (size, self._limit, self._limit - self._taken)]
                raise Refused(
                    f"it takes {mib[0]}; of the {mib[1]} that are allowed {mib[2]} are left", "raise --memory", memory=True
                )
            self._taken += size

    def give_back(self, size: int) -> None:
        """Forgets a bundle that was closed."""
        with self._lock:
            self._taken -= size


@dataclass(frozen=True, slots=True)
class Options:
    """`wait`: milliseconds that a request waits for others; `limit`: requests of a model that may wait or be open; `seconds`: that
    one may take, of a language model until its first token.  `devices`: the GPUs that have a copy of every model each; () is the
    first GPU, or the CPU for a bundle that is for one.  `threads`: of a call on the CPU.  `turns`: tokens that one call of a
    language model may make for each request.  `tokenizer`: a folder for bundles that have none beside them.  `memory`: what all may
    take.  `adapters`: names and folders of LoRA adapters of a language model."""

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
    """The folder with the tokenizer of a bundle whose model is called `name`: `X` beside `X.cgb`, or `name`, which a build from a
    GGUF file writes; the folder that the bundle lies in; and in a folder of models that of the model.  A bundle has none in
    itself."""
    places = [bundle.with_suffix("")] if bundle.suffix else []
    if name not in ("", ".", "..") and "/" not in name:
        places.append(bundle.parent / name)
    places.append(bundle.parent)
    if bundle.name == "model.cgb":
        places.append(bundle.parent.parent)
    return next((place for place in places if (place / "tokenizer.json").is_file()), None)
