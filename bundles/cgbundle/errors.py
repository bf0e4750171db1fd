"""The catalogue of runtime errors: a few classes that callers catch, a code per cause.

An error is one line: what is wrong, where, what was expected and found; `hint` says what to do.  `exit_code` is what the command
line returns: 1 when the bundle is wrong, 2 when the call, the machine or the path is.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any, ClassVar


class Cause:
    """A row of a catalogue: the class that is raised, the exit code, what it means, and what to do unless the raiser says."""

    __slots__ = ("error", "exit_code", "hint", "meaning")  # by hand: to make a dataclass takes `import cgbundle` a millisecond

    def __init__(self, error: type[CgbundleError], exit_code: int, meaning: str, hint: str = "") -> None:
        self.error, self.exit_code, self.meaning, self.hint = error, exit_code, meaning, hint


class CgbundleError(Exception):
    """Base of every error that is raised on purpose.  `code` names the cause in the catalogue, `hint` says what to do: a traceback
    shows both, `str()` the cause alone."""

    catalogue: ClassVar[Mapping[str, Cause]]
    escaped: ClassVar[bool] = False
    """Whether parts of a bundle or a call may stand in messages: what is not printable is escaped there, and a long one cut."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(one_line(message) if self.escaped else message)
        cause = self.catalogue[code]
        self.code, self.exit_code, self.hint = code, cause.exit_code, hint or cause.hint
        if self.hint:
            self.add_note(f"hint: {self.hint}")  # a traceback shows it

    @property
    def kind(self) -> str:
        """The code spelled as a class is: FileDamaged."""
        return self.code.title().replace("-", "")

    @property
    def where(self) -> str:
        """What the message says it is about: `model.py:12`, `gpt.cgb`, `sizes`, a field of a manifest.  "" where it begins with a
        sentence."""
        return place(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, str(self), self.hint)


class BundleError(CgbundleError):
    """The path holds no sound bundle, or one that this runtime cannot read."""

    escaped = True


class MachineError(CgbundleError):
    """This machine cannot run the bundle, or a library or driver under it failed."""

    escaped = True


class OutOfMemory(MachineError):
    """The device has too little free memory."""


class CallError(CgbundleError):
    """A call that does not fit the bundle's signature, or the moment."""

    escaped = True


class ProgramClosed(CallError):
    """The program was closed."""


class SessionBusy(CallError):
    """Two threads used one session at once."""


class StateMissing(CallError, KeyError):
    """The model has no such state."""

    __str__ = Exception.__str__  # KeyError's shows the message in quotes


class EntryMissing(CallError, KeyError):
    """The bundle has no such entry."""

    __str__ = Exception.__str__


def meant(name: str, known: Collection[str]) -> str:
    """What an error says behind a name that is none of `known`: " (did you mean decode?)", or "" where none is near."""
    from difflib import get_close_matches  # only where something is wrong

    return "".join([f" (did you mean {near}?)" for near in get_close_matches(name, known, 1, 0.6)])


def place(message: str) -> str:
    """What stands before the first colon and blank of a message, where it is one word or a path that exists; else ""."""
    where, colon, _ = message.partition(": ")
    if not colon or not any(map(str.isspace, where)):
        return where if colon else ""
    path, line, number = where.rpartition(":")
    return where if os.path.lexists(path if line and number.isdigit() else where) else ""


LONGEST = 2000
"""Characters of a message that speaks of what a bundle holds."""


def one_line(message: str) -> str:
    """`message` without anything that could drive a terminal or that no encoding has, and cut in the middle where it is long."""
    shown = _cut(message)
    if shown.isprintable():
        return shown
    return _cut("".join([c if c.isprintable() else " " if c in "\n\t" else c.encode("unicode_escape").decode() for c in shown]))


def _cut(message: str) -> str:
    return message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} ... {message[-LONGEST // 4 :]}"


DAMAGED = "the bundle is damaged: copy or build it again"
OTHER_TARGET = (
    "`cgcompile inspect` shows what it was built for: copy it to such a machine (here `verify` without --run checks it), or build "
    "for this one with --target"
)
GPU_LOG = "nvidia-smi and the system's log may say what is wrong with the GPU"

CATALOGUE: Mapping[str, Cause] = {
    # --- the path ---
    "bundle-missing": Cause(BundleError, 2, "There is nothing at the path.",
        "check the path; `cgcompile build MODEL -o PATH` writes a bundle"),
    "not-a-bundle": Cause(BundleError, 2, "The path exists but holds no manifest: a plain file, or some other directory.",
        "a bundle is the directory that `cgcompile build` writes"),
    # --- the bundle ---
    "format-unsupported": Cause(BundleError, 2, "The bundle's format version is not one that this runtime reads.",
        "upgrade cgcompile in this environment, or rebuild the bundle with the version installed here"),
    "manifest-invalid": Cause(BundleError, 1,
        "The manifest is not JSON, lacks a field, or a field is wrong: the message starts with its path.",
        "the bundle is damaged or was edited: build it again"),
    "file-damaged": Cause(BundleError, 1,
        "A file of the bundle is missing, has another length, or another SHA-256 than the manifest says.", DAMAGED),
    "image-invalid": Cause(BundleError, 1, "A kernel image or a shared object is no whole ELF file.", DAMAGED),
    "weights-invalid": Cause(BundleError, 1,
        "weights.safetensors has a bad header, or does not hold the tensors that the manifest names.", DAMAGED),
    "table-invalid": Cause(BundleError, 1, "A recording's table has a bad header, column, reference or relocation.", DAMAGED),
    "relocation-invalid": Cause(BundleError, 1,
        "An address of a recording lies outside its memory, or its place outside the parameters.", DAMAGED),
    "signature-missing": Cause(BundleError, 1, "A key was given, and the bundle is not signed.",
        "`cgcompile sign BUNDLE --key PRIVATE.pem` signs one; ask whoever made it"),
    "signature-wrong": Cause(BundleError, 1,
        "The signature is damaged, of another key than those given, or of another manifest than the bundle's.",
        "do not load it: get the bundle, and the key, from their maker again"),
    # --- the machine ---
    "wrong-machine": Cause(MachineError, 2, "This machine's processor, GPU or driver cannot run the bundle's code.", OTHER_TARGET),
    "wrong-architecture": Cause(MachineError, 2, "The GPU is of another architecture than the machine code of the bundle.",
        OTHER_TARGET),
    "driver-too-old": Cause(MachineError, 2, "The CUDA driver is older than the bundle's code needs.", OTHER_TARGET),
    "library-missing": Cause(MachineError, 2, "A shared library or package that the target or a key needs is not installed.",
        "install what the message names: torch (which is never imported) for code of the CPU, cryptography for keys"),
    "library-refused": Cause(MachineError, 2, "A shared object of the bundle, or a library under it, does not load, or not fit.",
        "build the bundle again with the versions installed here, or install those that `cgcompile inspect` shows"),
    "driver-failed": Cause(MachineError, 2, "A CUDA driver call failed; the message names the call and the driver's error.",
        GPU_LOG),
    "rank-timeout": Cause(MachineError, 2,
        "A rank of a model over several GPUs has waited too long for another one, which was not called or is gone.",
        "close the program and load the bundle again, on all ranks; load(..., timeout=) says how long they wait"),
    "out-of-memory": Cause(OutOfMemory, 2, "The device has too little free memory; the message gives needed and free bytes.",
        "give memory back first (nvidia-smi shows who has it), or build with smaller sizes"),
    "driver-differs": Cause(MachineError, 2, "An engine's graphs were saved with another version of the CUDA driver.",
        "save them again with this driver: remove the bundle, and start the engine twice"),
    # --- the call ---
    "assertion-failed": Cause(CallError, 2, "The call is one that the model forbids: what a line of it asserts is not so.",
        "give the call what that line of the model asserts, or build the model without it"),
    "operation-refused": Cause(CallError, 2,
        "Code of the model that the CPU runs raised an error inside a call: an operation refuses a value, most often.",
        "eager PyTorch says the same for these inputs: look at their values; if it does not, install the torch that `cgcompile "
        "inspect` shows"),
    "key-invalid": Cause(CallError, 2, "A key is none of ed25519, cannot be read, or is the private one where the public is meant.",
        "a key is a PEM file of `openssl pkey -pubout`, or 64 hexadecimal digits"),
    "bundle-kind": Cause(CallError, 2, "A bundle of an engine's graphs was to be loaded, or one of a program to be attached.",
        "cgbundle.attach(PATH, tensors) takes the graphs of an engine"),
    "not-verified": Cause(CallError, 2, "An engine's graphs were saved without a replay in a fresh process.",
        "save them with verify=True, or attach them with unverified=True"),
    "tensors-unlike": Cause(CallError, 2, "A tensor is missing, or lies otherwise than when the engine's graphs were saved.",
        "give tensors of the same dtype, shape, strides and alignment; or save the graphs again: remove the bundle first"),
    "graph-missing": Cause(EntryMissing, 2, "No graph was saved under this key.", "`list(graphs)` has all keys"),
    "option-refused": Cause(CallError, 2, "An option of `load` that means nothing for what the bundle was built for.",
        "leave it out"),
    "replica-state": Cause(CallError, 2,
        "A model that keeps state from call to call was called on several devices: the next call may go to another one.",
        "call a session of its own, which stays on one device: replicas.session()(...)"),
    "ranks-refused": Cause(CallError, 2,
        "What a model over several GPUs does not do: sessions, updates, or a load on another number of devices than it has ranks.",
        "`cgcompile inspect` says over how many GPUs the model is"),
    "ranks-unlike": Cause(CallError, 2,
        "The processes of a model's ranks do not fit together: another bundle, a rank that comes twice, or calls of other sizes.",
        "start one process for each rank, and call all of them alike, in one order; then load again, on all ranks"),
    "input-structure": Cause(CallError, 2,
        "The nesting, number, or names of the inputs differ from the signature, or a constant input has another value.",
        "`cgcompile inspect` prints the signature and a call that works"),
    "input-kind": Cause(CallError, 2, "An input is no tensor that the runtime can read (NumPy, torch, or DLPack).",
        "pass NumPy arrays, torch or CuPy tensors, or others that speak DLPack, all inputs of one kind"),
    "input-dtype": Cause(CallError, 2, "An input has another dtype.",
        "convert it before the call, or load the bundle with cast=True, which allows casts that lose nothing"),
    "input-device": Cause(CallError, 2, "An input lies on another device.",
        "move it to the program's device before the call"),
    "input-shape": Cause(CallError, 2,
        "An input has another rank, or another size on a fixed axis, or a size that no dimension gives.",
        "`cgcompile inspect` shows the shape of every input; a dimension by name may vary, a number may not"),
    "input-value": Cause(CallError, 2, "An input that is an index has an element out of range, and the call failed.",
        "the range follows from the size of what is indexed: an embedding, say, or a table of positions"),
    "input-layout": Cause(CallError, 2,
        "An output shares memory with a part of an input, which is laid out otherwise than recorded and has no such part.",
        "pass .contiguous() of it"),
    "input-unwritable": Cause(CallError, 2,
        "An input that the model writes to cannot be written to, or shares memory with another input or with itself.",
        "pass a tensor of its own, writable and without overlaps: a .clone() or .copy()"),
    "dimension-disagrees": Cause(CallError, 2, "Two inputs give different sizes for one declared dimension.",
        "give all inputs of one call the same sizes"),
    "key-missing": Cause(CallError, 2,
        "The int_key was not recorded, and the policy or the build's proof does not allow padding or chunks.",
        "call it at a recorded size, or build the bundle with more --sizes; `cgcompile inspect` says why others are refused, and "
        "`cgcompile explain padding` what a model can do about it"),
    "stale-view": Cause(CallError, 2, 'An output handed out by `outputs="view"` was read after the next replay.',
        'call .clone() before the next call, or load the bundle with outputs="copy"'),
    "program-closed": Cause(ProgramClosed, 2, "The program was closed.", "load the bundle again"),
    "session-busy": Cause(SessionBusy, 2, "Two threads used one session at once.",
        "give every thread a session of its own: program.session()"),
    "process-forked": Cause(CallError, 2,
        "The process was forked after the program was loaded, or after code for the CPU or a GPU had run in its parent.",
        "load the bundle in the child before any call in the parent, or start processes by spawn, not by fork"),
    "entry-missing": Cause(EntryMissing, 2, "The bundle has no entry of that name, or several of which the call names none.",
        "`program.entries` lists them"),
    "state-missing": Cause(StateMissing, 2, "The model has no state of that name, or none at all.",
        "`program.state` lists what there is"),
    "state-invalid": Cause(CallError, 2,
        "A value for a state is of another dtype or shape, lies elsewhere, or is no tensor at all.",
        "give a tensor of the dtype and shape that `program.state` has under that name"),
    "state-rows": Cause(CallError, 2, "The model's state cannot have so many rows, or has no dimension of that name.",
        "`cgcompile inspect` lists the dimensions of the state, and the fewest rows of each"),
    "update-invalid": Cause(CallError, 2,
        "What `program.update` was given does not fit: a name, a dtype, a shape, a file that is cut off, or a weight is missing.",
        "give what the model's state_dict has; nothing was changed"),
    "update-refused": Cause(CallError, 2,
        "A weight cannot be updated: it is a constant of the model, state, or the build computed something of it that code holds.",
        "`cgcompile inspect` lists these weights; build the bundle again with the new ones"),
    "self-test-crashed": Cause(BundleError, 1, "The process that replays the self-test ended before it gave an answer.",
        "build the bundle again with the versions installed here; if it stays, please report the model"),
    "self-test-outdated": Cause(CallError, 2,
        "The self-test of a program whose weights were updated: its outputs are those of the bundle's own weights.",
        "load the bundle again to prove it; compare the updated program with eager PyTorch"),
    "capture-refused": Cause(CallError, 2,
        "The caller's stream is being captured into a CUDA graph, and the call cannot become part of one.",
        "call it outside the capture, or with tensors of the GPU and a bundle without host regions"),
}  # fmt: skip

CgbundleError.catalogue = CATALOGUE
