"""The catalogue of runtime errors: one class per defect.

An error is one line: what is wrong, where, what was expected and found; `hint` says what to do.  `exit_code` is what the command
line returns: 1 when the bundle is wrong, 2 when the call, the machine or the path is.
"""

from __future__ import annotations


class CgbundleError(Exception):
    """Base of every error that cgbundle raises on purpose."""

    exit_code = 1
    hint = ""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        if hint:
            self.hint = hint


# --- the path -------------------------------------------------------------------------------------------------


class BundleMissing(CgbundleError):
    """There is nothing at the path."""

    exit_code = 2
    hint = "check the path; `cgcompile build MODEL -o PATH` writes a bundle"


class NotABundle(CgbundleError):
    """The path exists but holds no manifest: a plain file, or some other directory."""

    exit_code = 2
    hint = "a bundle is the directory that `cgcompile build` writes"


# --- the bundle -----------------------------------------------------------------------------------------------


class FormatUnsupported(CgbundleError):
    """The bundle's format version is not one that this runtime reads."""

    exit_code = 2
    hint = "upgrade cgcompile in this environment, or rebuild the bundle with the version installed here"


class ManifestInvalid(CgbundleError):
    """The manifest is not JSON, lacks a field, has a wrong type, or breaks an invariant; the message starts with the field's
    path."""

    hint = "the bundle is damaged or was edited: build it again"


class FileDamaged(CgbundleError):
    """A file of the bundle is missing, has another length, or another SHA-256 than the manifest says."""

    hint = "the bundle is damaged: copy or build it again"


class WeightsInvalid(CgbundleError):
    """weights.safetensors has a bad header, or does not hold the tensors that the manifest names."""

    hint = "the bundle is damaged: copy or build it again"


class TableInvalid(CgbundleError):
    """A recording's table has a bad header, column, reference or relocation."""

    hint = "the bundle is damaged: copy or build it again"


class RelocationInvalid(TableInvalid):
    """An address of a recording lies outside its memory, or its place outside the parameters."""


class ExamFailed(CgbundleError):
    """A replay of the stored exam gave another result than the bundle promises."""

    hint = "build the bundle again on this kind of machine"


# --- the machine ----------------------------------------------------------------------------------------------


class WrongMachine(CgbundleError):
    """This machine's processor, GPU or driver cannot run the bundle's code."""

    exit_code = 2
    hint = "`cgcompile inspect` shows what the bundle was built for; build it for this machine with --target"


class WrongArchitecture(WrongMachine):
    """The GPU is of another architecture than the machine code of the bundle."""


class DriverTooOld(WrongMachine):
    """The CUDA driver is older than the bundle's code needs."""


class LibraryMissing(CgbundleError):
    """A shared library or package that the target needs is not installed."""

    exit_code = 2


class LibraryRefused(CgbundleError):
    """A shared object of the bundle, or a library under it, failed to load or to run."""

    exit_code = 2


class DriverFailed(CgbundleError):
    """A CUDA driver call failed; the message names the call and the driver's error."""

    exit_code = 2
    hint = "nvidia-smi and the system's log may say what is wrong with the GPU"


class OutOfMemory(CgbundleError):
    """The device has too little free memory; the message gives needed and free bytes."""

    exit_code = 2
    hint = "give memory back first (nvidia-smi shows who has it), or build with smaller sizes"


# --- the call -------------------------------------------------------------------------------------------------


class CallError(CgbundleError):
    """A call that does not fit the bundle's signature."""

    exit_code = 2


class InputStructure(CallError):
    """The nesting, number, or names of the inputs differ from the signature, or a constant input has another value."""


class InputKind(CallError):
    """An input is no tensor that the runtime can read (NumPy, torch, or DLPack)."""


class InputDtype(CallError):
    """An input has another dtype."""


class InputDevice(CallError):
    """An input lies on another device."""


class InputShape(CallError):
    """An input has another rank, or another size on a fixed axis, or a size that no dimension gives."""


class InputLayout(CallError):
    """An output shares memory with a part of an input, which is laid out otherwise than recorded and has no such part."""

    hint = "pass .contiguous() of it"


class InputUnwritable(CallError):
    """An input that the model writes to cannot be written to, or shares memory with another input or with itself."""


class DimensionDisagrees(CallError):
    """Two inputs give different sizes for one declared dimension."""


class KeyMissing(CallError):
    """The int_key was not recorded, and the policy or the build's proof does not allow padding or cutting."""


class StaleView(CallError):
    """An output handed out by `outputs="view"` was read after the next replay."""

    hint = 'call .clone() before the next call, or load the bundle with outputs="copy"'


class ProgramClosed(CallError):
    """The program was closed."""

    hint = "load the bundle again"


class SessionBusy(CallError):
    """Two threads used one session at once."""

    hint = "give every thread a session of its own: program.session()"


class StateMissing(CallError, KeyError):
    """The model has no state of that name, or none at all."""

    __str__ = Exception.__str__  # KeyError's shows the message in quotes


class StateInvalid(CallError):
    """A value for a state is of another dtype or shape, lies elsewhere, or is no tensor at all."""


class CaptureRefused(CallError):
    """The caller's stream is being captured into a CUDA graph, and the call cannot become part of one."""
