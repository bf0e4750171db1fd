"""The tensors that a self-test compares, and their bounds, from the manifest."""

from __future__ import annotations

from ..errors import BundleError
from ..format.file_names import SELF_TEST, self_test_entry
from ..format.records import dataclass
from ..format.safetensors import Mapped
from ..format.schema import EntrySpec, Manifest, TensorSpec, Weight

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from .tensor import Tensor

WAIVER = "mismatched-integers"
"""Integers or booleans that differ from eager PyTorch's, because they depend on rounded floats.

What it looks for: outputs of such a dtype that differ when the build compares the bundle with eager PyTorch.  Indices of floats
that are equal within tolerance do not count.
Why: compiled code rounds less often than eager PyTorch, and that can change a comparison or a conversion.
Effect: the build fails with proof-failed.  With --allow, the fraction that differed is stored as the output's bound.
Fix: return the floats instead, or build with --allow mismatched-integers.
Source: the comparison in cgbundle/tensors/comparison.py.
"""

NEAR_TIES = "near-ties"
"""Indices that another processor may select differently, because their floats are equal within tolerance.

What it looks for: indices of `argmax`, `topk`, `sort`, `multinomial` and similar operators in the self-test, if another element is
within tolerance of the selected one.
Why: kernels of another processor round differently, and may select the other element.
Effect: the fraction of such indices is stored as the output's bound, and `cgcompile verify --run` allows this fraction to differ.
Fix: none needed; if the indices must be those of eager PyTorch, select among floats of a wider dtype.
Source: cgcompile/transforms/near_ties.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedTensor:
    """`kind`: output, mutated (an input) or state; `index`: its position in the signature or the weights."""

    kind: str
    index: int
    name: str
    dtype: str

    @property
    def title(self) -> str:
        """`output logits (bfloat16)`."""
        return f"{'input' if self.kind == 'mutated' else self.kind} {self.name} ({self.dtype})"


def self_test_tensors(manifest: Manifest, entry: EntrySpec) -> list[ComparedTensor]:
    """Outputs, mutated inputs, and state weights, in this order."""
    tensors = [_compared("output", index, spec) for index, spec in enumerate(entry.outputs)]
    mutated = [(index, entry.inputs[index]) for index in entry.mutated_inputs]
    tensors += [_compared("mutated", index, spec) for index, spec in mutated]
    state = [(index, weight) for index, weight in enumerate(manifest.weights) if weight.memory == "state"]
    return tensors + [_compared("state", index, weight) for index, weight in state]


def _compared(kind: str, index: int, row: TensorSpec | Weight) -> ComparedTensor:
    return ComparedTensor(kind=kind, index=index, name=row.name, dtype=row.dtype)


def is_exact(dtype: str) -> bool:
    """Whether values have to be equal: integers and booleans."""
    return not dtype.startswith(("float", "bfloat", "complex"))


def inputs_of(self_test: Mapped, entry: EntrySpec, key: tuple[int, ...]) -> list[Tensor]:
    """The self-test's inputs for `key`, copied."""
    from .tensor import from_bytes  # no load needs it

    names = [self_test_entry(key, "input", index, entry.name) for index in range(len(entry.inputs))]
    return [from_bytes(stored(self_test, name), self_test.entries[name].dtype, self_test.entries[name].shape) for name in names]


def stored(self_test: Mapped, name: str) -> memoryview:
    """The bytes of a self-test tensor. Raises weights-invalid."""
    if name not in self_test.entries:
        raise BundleError("weights-invalid", f"{SELF_TEST}: tensor {name!r} is missing")
    return self_test.data(name)
