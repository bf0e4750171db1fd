"""The memory layout of a compiled host region: the constants that it reads, and the strides of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.export import ExportedProgram

from cgbundle.cpu import libtorch
from cgbundle.cpu.host_region import HostRegion, Layout, RegionOutputs
from cgbundle.format.schema import Weight

from ...errors import BuildError, ModelError
from ...export.weights import weight_tensors
from ...model.flat_module import PREFIX
from ...model.pytree import dtype_name
from ...util.raw_bytes import copied, put_back
from ..weights import unbound


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A loaded shared object.  `functions`: the C interface of its tensors.  `constants`: (the object's name of a constant,
    position of the weight in the manifest).  `state`: (copy to which it writes, buffer of the program).  `unbound`: as in
    `weights.unbound`."""

    region: HostRegion
    functions: libtorch.LibTorch
    constants: tuple[tuple[str, int], ...]
    state: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    unbound: frozenset[str]

    def restore(self) -> None:
        """Resets the state to its initial values."""
        for current, initial in self.state:
            put_back(current, initial)


def bind_constants(path: Path, program: ExportedProgram, weights: Sequence[Weight]) -> Bound:
    """Loads the shared object of `program`, with the model's tensors as constants, and with copies of the tensors to which it
    writes.  Raises constant-unknown for a constant that is not a weight."""
    code = path.read_bytes()
    torch_library = libtorch.of_code(code, path.name) or libtorch.load(torch.__version__)
    region = HostRegion(code, torch_library, path.name)
    tensors = weight_tensors(program)
    positions = {row.name: index for index, row in enumerate(weights)}
    pairs, bound, state = [], {}, []
    for label, full_name in region.constants():
        name = full_name.removeprefix(PREFIX)
        if full_name not in tensors or name not in positions:
            raise ModelError(
                "constant-unknown",
                f"the compiled code reads the constant {label!r} ({full_name or 'made by Inductor'}), not a weight of the model",
            )
        pairs.append((label, positions[name]))
        value = tensors[full_name].detach()
        if weights[positions[name]].memory == "state":
            state.append((copied(value), value))
            value = state[-1][0]
        bound[label] = (value.data_ptr(), Layout(torch_library.dtype(dtype_name(value.dtype)), value.shape, value.stride()))
    region.bind(bound)
    unbound_names = frozenset(unbound(program, [full_name for _, full_name in region.constants()]))
    return Bound(region=region, functions=torch_library, constants=tuple(pairs), state=tuple(state), unbound=unbound_names)


def output_strides(bound: Bound, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Runs the region once, from its initial state, and returns the strides of its outputs.  Raises compiler-failed if their
    number, dtype or shape differs from eager PyTorch's."""
    torch_library = bound.functions
    layouts = [Layout(torch_library.dtype(dtype_name(value.dtype)), value.shape, value.stride()) for value in inputs]
    bound.restore()
    region_outputs = RegionOutputs(torch_library, len(outputs))
    bound.region.run([value.data_ptr() for value in inputs], layouts, region_outputs.handles)
    actual_strides = []
    for index, (handle, expected) in enumerate(zip(region_outputs.handles, outputs, strict=True)):
        dtype, shape, strides = torch_library.layout(handle or 0)
        same_dtype = dtype == torch_library.dtype(dtype_name(expected.dtype))
        if shape != tuple(expected.shape) or not same_dtype:
            raise BuildError(
                "compiler-failed",
                f"the compiled code gives output {index} the shape {list(shape)}{'' if same_dtype else ' and another dtype'}, "
                f"eager PyTorch {dtype_name(expected.dtype)} {list(expected.shape)}",
            )
        actual_strides.append(strides)
    return actual_strides
