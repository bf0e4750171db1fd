"""Why a recording was refused: one class per reason.

A message is one line that names what was met: the int_key, the node and its kernel, the parameter and the word of it, the
allocation behind an address.  Nothing here is caught inside `cgcompile.record`; the recorder's child process hands the class name
and the message to its parent, which raises the same class (`raise_named`).
"""

from __future__ import annotations

from .. import errors
from ..errors import BuildError


class RecordError(BuildError):
    """Base of every refusal of the recorder."""

    hint = "other kernels may do: try --lower eager, or --record trace; and please report the model"


# --- the environment ------------------------------------------------------------------------------------------


class CuptiUnavailable(RecordError):
    """libcupti was not found, or refused the subscription."""

    exit_code = 2
    hint = "install torch with its CUDA libraries (nvidia-cuda-cupti), and run without another profiler attached"


class DriverCallFailed(RecordError):
    """A CUDA driver call that the recorder needs failed."""

    exit_code = 2
    hint = "nvidia-smi and the system's log may say what is wrong with the GPU"


class RecorderFailed(RecordError):
    """A recorder process died without naming a reason; the message gives the last line it wrote and the log's path."""

    hint = "the log has all that the process wrote; please report the model"


# --- lowering and capture -------------------------------------------------------------------------------------


class LoweringFailed(RecordError):
    """The program could not be lowered at this level."""

    hint = "try --lower eager, or see `cgcompile check` for what has to be cut out of the graph"


class NotCapturable(RecordError):
    """The stream capture was broken: the program synchronizes, copies from unpinned host memory, or allocates while captured."""

    hint = "`cgcompile check` names the operation; it has to run in a host region"


class RandomnessRefused(RecordError):
    """The program draws random numbers; a bundle would repeat the same ones on every replay."""

    hint = "call model.eval(), or pass the random tensor as an input"


class InputMutated(RecordError):
    """A replay changed an input that the program is not known to write to; a bundle would not hand the change back."""

    hint = "return the changed tensor as an output, and please report this model"


class WeightMutated(RecordError):
    """A replay changed a weight that the program is not known to write to; sessions share weights."""

    hint = "register it as a buffer of the module, and please report this model"


class SharedStorage(RecordError):
    """A buffer that the program changes overlaps another weight, so that placing the two apart would break the link."""

    hint = "give the buffer a tensor of its own"


class SizesDiffer(RecordError):
    """The inputs of one int_key do not fit the program's signature, or two sets of inputs for one key differ in shape."""

    exit_code = 2
    hint = "inputs() has to give the same shapes for the same sizes"


# --- what a captured graph may hold ---------------------------------------------------------------------------


class NodeRefused(RecordError):
    """A node of a kind that a bundle cannot hold; the message says which and why."""


class CopyRefused(RecordError):
    """A memcpy node that reads or writes host memory, an array, or a memory that is not ours."""


class AttributeRefused(RecordError):
    """A launch attribute that cannot be carried to another process."""


class ParametersUnreadable(RecordError):
    """A kernel node without a parameter layout, or whose parameters lie in neither of the two known forms."""


# --- images ---------------------------------------------------------------------------------------------------


class ImageUnseen(RecordError):
    """No image was seen for the module of a kernel, or several that hold the symbol."""


class ImageFormat(RecordError):
    """An image is not a cubin ELF file, or a damaged one."""


class LoaderUnknown(RecordError):
    """An image was loaded inside a driver call that the recorder does not know, so that its module is unknown."""

    hint = "report the driver call's name: the recorder has to learn where it holds the module"


# --- the comparison of two recordings -------------------------------------------------------------------------


class RecordingsDiffer(RecordError):
    """Two processes recorded different graphs for the same key: number of nodes, kernels, images, grids, edges or attributes."""

    hint = "the lowering is not deterministic: give both processes the same compile cache"


class AddressDisagrees(RecordError):
    """A word is an address of ours in both recordings, but not of the same place."""


class MemoryRefused(RecordError):
    """A word is an address of memory that a bundle cannot hold: pinned host memory, or an allocation that is too large."""


class PointerInTable(RecordError):
    """A table that a kernel reads holds addresses itself; only parameters and module variables are relocated."""


class ModuleStateDiffers(RecordError):
    """A module variable has another value in every process, and the difference is no address that could be relocated."""


class ModuleStateUnreadable(RecordError):
    """A module variable that a kernel may have changed has no handle to read it by."""


def raise_named(name: str, message: str, hint: str) -> None:
    """Raise the error that a recorder process named; a name of neither catalogue becomes `RecorderFailed`."""
    found = globals().get(name) or getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, BuildError):
        raise found(message, hint)
    raise RecorderFailed(message, hint)
