"""Why a recording for an absent GPU was refused: one class per reason.

A message is one line that names what was met: the int_key, the kernel, the argument or the buffer.
"""

from __future__ import annotations

from ..errors import BuildError


class TraceError(BuildError):
    """Base of every refusal of the trace recorder."""

    hint = "this is a defect of cgcompile: please report the model"


class CacheUnsafe(TraceError):
    """The folder where results are kept belongs to someone else, or others can write to it."""

    exit_code = 2
    hint = "chmod go-w it, or set CGCOMPILE_CACHE to a folder of your own"


# --- compiling ------------------------------------------------------------------------------------------------


class KernelFailed(TraceError):
    """Triton or ptxas could not compile a kernel; the message names it and gives the compiler's first line."""

    hint = "please report the kernel's source: it was made for this architecture and should compile"


class KernelTooLarge(TraceError):
    """A kernel needs more shared or tensor memory than a block of the target may have."""

    hint = "take a configuration with smaller blocks or fewer stages"


class KernelUnsupported(TraceError):
    """A compiled kernel needs something at its launch that a bundle does not give: scratch memory, tensor descriptors."""

    hint = "take another configuration of this kernel"


class CompilerDied(TraceError):
    """A process that compiles kernels ended without an answer; the message gives the last line that it wrote."""


# --- placing --------------------------------------------------------------------------------------------------


class LifetimeBroken(TraceError):
    """A buffer is used before it was allocated or after it was released, or allocated twice."""


class ArenaOverlap(TraceError):
    """Two buffers share bytes of the arena while both are needed: the plan is wrong."""

    hint = "this is a defect of cgcompile: please report the model"


class PlaceInvalid(TraceError):
    """A buffer has no place, or one that is not aligned or not inside its memory."""


# --- assembling -----------------------------------------------------------------------------------------------


class ParameterMismatch(TraceError):
    """An argument does not fit the kernel's parameter: another size, type, number of arguments or alignment."""


# --- interpreting ---------------------------------------------------------------------------------------------


class NoStandIn(TraceError):
    """A kernel uses a function that the interpreter cannot do on the CPU; the message names the function and the kernel."""

    hint = "the recording cannot be proved on this machine: build where the target GPU is, or report the function"


class ReadOutside(TraceError):
    """A kernel reads memory outside the bundle's memories, or at an address that is not aligned."""

    hint = "this is a defect of cgcompile: please report the model"


class WroteOutside(TraceError):
    """A kernel writes memory outside the bundle's memories, or at an address that is not aligned."""

    hint = "this is a defect of cgcompile: please report the model"


class KernelAsserted(TraceError):
    """An assertion in a kernel failed when it was interpreted: an index out of range, or a promise to the compiler that does not
    hold."""

    hint = "an index of the example inputs may be out of range: look at inputs()"


class OrderBroken(TraceError):
    """A recording's rows do not stand in an order in which its edges allow them to run."""

    hint = "this is a defect of cgcompile: please report the model"


class KernelUnreadable(TraceError):
    """The source of a kernel is no Python, does not define the kernel, or fails when the interpreter runs it."""


class InterpreterDied(TraceError):
    """A process that interprets kernels ended without an answer; the message gives the last line that it wrote."""


# --- lowering -------------------------------------------------------------------------------------------------


class GpuVisible(TraceError):
    """A process that lowers for an absent GPU sees a real one, which it must not touch."""

    exit_code = 2
    hint = "lower in a process of its own"


class OperationNeedsGpu(TraceError):
    """Operations that do not become Triton kernels: a library would compute them, or their result's shape depends on data."""

    hint = "replace the operation in the model, or build on a machine with this GPU: library kernels are captured there"


class RandomnessUnsupported(TraceError):
    """The program draws random numbers; a bundle would repeat the same ones on every replay."""

    hint = "call model.eval(), or pass the random tensor as an input"


class InputChanged(TraceError):
    """The program writes into one of its inputs; a bundle could not hand the change back to the caller."""

    hint = "return the changed tensor as an output"


class StateShared(TraceError):
    """A tensor of the model that the program changes lies in the same memory as another one."""

    hint = "clone one of the two when the model is made"


class ConstantUnknown(TraceError):
    """A kernel reads a tensor that is neither an input nor one of the model's parameters, buffers and constants."""

    hint = "register the tensor as a buffer of the model"


class SizesUnlike(TraceError):
    """The tensors of a call do not fit the program's inputs."""

    exit_code = 2


class LoweringBroken(TraceError):
    """Inductor failed on the program, or wrote a wrapper that does something unknown; the message has its first line."""

    hint = "this may be a defect of cgcompile: please report the model"


class MeasurementsBroken(TraceError):
    """The table of measured configurations cannot be read; the message names the file."""

    hint = "install cgcompile again"
