"""Why a program cannot be cut into regions: one class per reason."""

from __future__ import annotations

from ..errors import BuildError


class PartitionError(BuildError):
    """Base of every refusal of the partitioner."""


class DataDependentOutput(PartitionError):
    """An output of the program is a number of the host or has a size that depends on data: it cannot leave its host region."""

    hint = "return a tensor of a fixed size, padded where it is shorter, and the length as a tensor"


class ProgramUnsupported(PartitionError):
    """The program has inputs or outputs that regions cannot pass on: objects, tokens, or new values of buffers and inputs."""

    hint = "export the model again: the partitioner takes the programs that cgcompile exports"


class NodeUnknown(PartitionError):
    """A placement names a node that the program does not have."""

    hint = "this is a defect of cgcompile: please report the model"


class InputsUnlike(PartitionError):
    """The tensors of a key do not fit the program's inputs, or do not decide all of its sizes."""

    exit_code = 2
