"""The catalogue of build errors: one class per reason.  They share cgbundle's base, so that one place turns errors into text.

`exit_code` 1: the model has findings or cannot be built; 2: usage or environment.  A message is one line: where, what, expected
and found.
"""

from __future__ import annotations

from cgbundle.errors import CgbundleError


class BuildError(CgbundleError):
    """Base of every error that building or checking raises on purpose."""


# --- the source -------------------------------------------------------------------------------------------------


class SourceMissing(BuildError):
    """No such model file, module, attribute, or saved program."""

    exit_code = 2


class SourceInvalid(BuildError):
    """The model file cannot be run, or lacks model() or inputs(), or these do not return what they should."""


class SizesInvalid(BuildError):
    """Sizes that are not distinct positive whole numbers, or name a dimension that inputs() does not declare."""

    exit_code = 2


class TooManyKeys(BuildError):
    """The product of the sizes has more int_keys than are built without being asked."""

    exit_code = 2


# --- the model --------------------------------------------------------------------------------------------------


class DimensionUnused(BuildError):
    """A declared dimension changes no shape of the inputs."""


class ShapeIrregular(BuildError):
    """An input's size is no multiple of one declared dimension plus a constant."""


class SizeExcluded(BuildError):
    """The model does not work for a declared size: export found a constraint, or the model raised."""


class ExportFailed(BuildError):
    """torch.export cannot take the model; the message carries the user's file and line."""


class BranchOnData(ExportFailed):
    """Python branches on the value of a tensor: an exported program has one of the branches only."""


class StructureUnsupported(BuildError):
    """An input or output is of a type that a bundle cannot describe."""


class OutputSizeUnknown(StructureUnsupported):
    """An output has a size that depends on data."""

    hint = "return a tensor of a fixed size, padded where it is shorter, and the length as a tensor"


class StateChanged(BuildError):
    """forward() gives a buffer another dtype or shape: state has a fixed place."""

    hint = "keep its dtype and shape from call to call"


class DtypeUnsupported(BuildError):
    """A tensor has a dtype, layout or device that a bundle cannot hold."""


class ConstantUnsaved(BuildError):
    """The compiled code wants a constant that is not among the model's weights."""

    hint = "register the tensor as a buffer of the model"


class Refused(BuildError):
    """A check with severity `refuse` fired and was not waived, or --strict turned a host region into an error."""


class OutputsShared(BuildError):
    """Outputs share memory with something else in eager PyTorch, in a way that a bundle cannot keep."""

    hint = "clone the output in forward()"


class HostOpUnknown(BuildError):
    """An operator that is to be kept on the host is none that the model calls."""

    exit_code = 2


# --- a trace of request sizes -----------------------------------------------------------------------------------


class TraceMissing(BuildError):
    """There is no such trace file."""

    exit_code = 2


class TraceInvalid(BuildError):
    """A trace holds no sizes, or something else than positive whole numbers; the message gives the line."""

    exit_code = 2


class TraceColumnUnknown(BuildError):
    """A trace has no column of that name, or several; the message lists the columns."""

    exit_code = 2


class LimitInvalid(BuildError):
    """The number of capture sizes to propose, or what they are to be multiples of, is below 1."""

    exit_code = 2


# --- the environment --------------------------------------------------------------------------------------------


class ExtraMissing(BuildError):
    """A package that building needs is not installed."""

    exit_code = 2


class TorchUnsupported(BuildError):
    """This torch lacks something that the compiler uses; the message names it and the versions it was tested on."""

    exit_code = 2


class TargetUnavailable(BuildError):
    """The target cannot be built for on this machine, or does not exist."""

    exit_code = 2


class CompilerFailed(BuildError):
    """The C++ compiler, Inductor or Triton failed on the model."""

    hint = "please report the model"


class OperatorWithoutCode(BuildError):
    """A custom operator would have to be called through Python at run time, which a bundle does without."""

    hint = "write it with torch.library.custom_op over PyTorch's own operations, or take it out of the model"


class OutputExists(BuildError):
    """The destination exists and --force was not given."""

    exit_code = 2


class OutputUnwritable(BuildError):
    """The destination's folder does not exist or cannot be written."""

    exit_code = 2


class ProofFailed(BuildError):
    """The fresh process that verifies the bundle failed, or got other results than eager PyTorch: nothing was published."""


# --- a benchmark ------------------------------------------------------------------------------------------------


class PeerUnknown(BuildError):
    """A benchmark is asked to compare with something that it does not know; the message lists what it knows."""

    exit_code = 2


class PeerUnwritable(BuildError):
    """The bundle's program cannot be written as Python for PyTorch to run it beside the bundle."""

    hint = "give --model with your own model file"


class PeerFailed(BuildError):
    """The process of a peer, or what prepares it, ended with an error: the benchmark goes on without it."""


class BenchFailed(BuildError):
    """The bundle itself could not be measured here: its process ended with an error."""

    exit_code = 2
