"""The catalogue of runtime errors: the class, exit code, meaning and hint of every code. It is imported with the first error."""

from __future__ import annotations

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from collections.abc import Mapping


class Cause:
    """A row of a catalogue: name of the class, exit code, meaning, default hint."""

    __slots__ = ("error", "exit_code", "hint", "meaning")  # not a dataclass, which would add a millisecond to `import cgbundle`

    def __init__(self, error: str, exit_code: int, meaning: str, hint: str = "") -> None:
        self.error, self.exit_code, self.meaning, self.hint = error, exit_code, meaning, hint


DAMAGED = "the bundle is damaged: copy or build it again"
OTHER_TARGET = (
    "`cgcompile inspect` shows the machine that the bundle needs: copy it there, or build for this machine with --target "
    "(`verify` without --run checks the files on any machine)"
)
GPU_LOG = "nvidia-smi and the system log may show the cause"

CATALOGUE: Mapping[str, Cause] = {
    # --- the path ---
    "bundle-missing": Cause("BundleError", 2, "The path does not exist.",
        "check the path; `cgcompile build MODEL -o PATH` writes a bundle"),
    "not-a-bundle": Cause("BundleError", 2, "The path has no manifest: it is a file, or another kind of directory.",
        "a bundle is the directory that `cgcompile build` writes"),
    # --- the bundle ---
    "format-unsupported": Cause("BundleError", 2, "This runtime does not support the bundle's format version.",
        "upgrade cgcompile in this environment, or build the bundle again with the installed version"),
    "manifest-invalid": Cause("BundleError", 1,
        "The manifest is not JSON, lacks a field, or has a wrong field. The message starts with the path of the field.",
        "the bundle is damaged or was edited: build it again"),
    "file-damaged": Cause("BundleError", 1, "A file of the bundle is missing, or its length or SHA-256 differs from the manifest.",
        DAMAGED),
    "image-invalid": Cause("BundleError", 1, "A kernel image or a shared object is not a complete ELF file.", DAMAGED),
    "weights-invalid": Cause("BundleError", 1, "weights.safetensors has an invalid header, or lacks tensors of the manifest.",
        DAMAGED),
    "table-invalid": Cause("BundleError", 1, "The table of a recording has an invalid header, column, reference or relocation.",
        DAMAGED),
    "relocation-invalid": Cause("BundleError", 1,
        "A recording has an address outside its memory, or a relocation outside the kernel parameters.", DAMAGED),
    "signature-missing": Cause("BundleError", 1, "A key was given, but the bundle is not signed.",
        "ask the builder of the bundle to run `cgcompile sign BUNDLE --key PRIVATE.pem`"),
    "signature-wrong": Cause("BundleError", 1, "The signature is damaged, or it belongs to another key or another manifest.",
        "do not load the bundle: ask its builder for the bundle and the key again"),
    # --- the machine ---
    "wrong-machine": Cause("MachineError", 2, "The processor, GPU or driver of this machine cannot run the bundle's code.",
        OTHER_TARGET),
    "wrong-architecture": Cause("MachineError", 2, "The bundle's code is for another GPU architecture.", OTHER_TARGET),
    "driver-too-old": Cause("MachineError", 2, "The bundle's code needs a newer CUDA driver.", OTHER_TARGET),
    "library-missing": Cause("MachineError", 2,
        "A shared library or Python package is not installed. The target, or the check of a key, needs it.",
        "install what the message names: torch (never imported) for CPU code, cryptography for keys"),
    "library-refused": Cause("MachineError", 2,
        "A shared object of the bundle, or a library that it needs, cannot be loaded or is incompatible.",
        "build the bundle again with the versions installed here, or install the versions that `cgcompile inspect` shows"),
    "driver-failed": Cause("MachineError", 2,
        "A CUDA driver call failed. The message has the call and the driver's error.", GPU_LOG),
    "rank-timeout": Cause("MachineError", 2,
        "A rank of a model over several GPUs waited too long for another rank, which made no call or has ended.",
        "close the program and load the bundle again, on all ranks; load(..., timeout=) sets the seconds of the wait"),
    "out-of-memory": Cause("OutOfMemory", 2,
        "The device has too little free memory. The message has the needed and the free bytes.",
        "free memory first (nvidia-smi lists the processes), or build with smaller sizes"),
    "driver-differs": Cause("MachineError", 2, "The graphs of an engine were saved with another version of the CUDA driver.",
        "save the graphs again with this driver: remove the bundle, and start the engine twice"),
    # --- the call ---
    "assertion-failed": Cause("CallError", 2, "An assertion of the model failed for this call.",
        "change the inputs so that the assertion holds, or remove it from the model and build again"),
    "operation-refused": Cause("CallError", 2,
        "An operation on the CPU failed during a call, usually because it does not accept a value.",
        "look at the values of the inputs: eager PyTorch should fail on them too; if it does not, install the torch that "
        "`cgcompile inspect` shows"),
    "key-invalid": Cause("CallError", 2, "A key is not an ed25519 key, cannot be read, or is private where a public key is needed.",
        "a key is a PEM file of `openssl pkey -pubout`, or 64 hexadecimal digits"),
    "bundle-kind": Cause("CallError", 2,
        "`load` was called for a bundle of an engine's graphs, or `attach` for a bundle of a program.",
        "use cgbundle.attach(PATH, tensors) for the graphs of an engine, cgbundle.load(PATH) for a program"),
    "not-verified": Cause("CallError", 2, "The graphs of an engine were saved without verification in a fresh process.",
        "save them with verify=True, or attach them with unverified=True"),
    "tensors-unlike": Cause("CallError", 2,
        "A tensor is missing, or its layout differs from the one when the engine's graphs were saved.",
        "pass tensors of the same dtype, shape, strides and alignment; or remove the bundle, and save the graphs again"),
    "graph-missing": Cause("EntryMissing", 2, "No graph was saved under this key.", "`list(graphs)` has all keys"),
    "option-refused": Cause("CallError", 2, "An option of `load` does not apply to the target of the bundle.",
        "leave the option out"),
    "replica-state": Cause("CallError", 2,
        "A model with state was called on several devices, where the next call may use another device.",
        "use a session, which stays on one device: replicas.session()(...)"),
    "ranks-refused": Cause("CallError", 2,
        "A model over several GPUs does not support sessions, updates, or a load on another number of devices than its ranks.",
        "`cgcompile inspect` shows the number of GPUs of the model"),
    "ranks-unlike": Cause("CallError", 2,
        "The processes of the ranks do not match: they load another bundle, use one rank twice, or call other sizes.",
        "start one process for each rank, and make the same calls in the same order; then load again on all ranks"),
    "input-structure": Cause("CallError", 2,
        "The nesting, number or names of the inputs differ from the signature, or a constant has another value.",
        "`cgcompile inspect` prints the signature and a correct call"),
    "input-kind": Cause("CallError", 2, "An input is not a NumPy array, a torch tensor, or a tensor with DLPack.",
        "pass NumPy arrays, torch or CuPy tensors, or other tensors with DLPack, all inputs from one library"),
    "input-dtype": Cause("CallError", 2, "An input has another dtype than the signature.",
        "convert it before the call, or load the bundle with cast=True, which allows lossless casts"),
    "input-device": Cause("CallError", 2, "An input is on another device than the program.",
        "move it to the program's device before the call"),
    "input-shape": Cause("CallError", 2,
        "An input has a wrong number of axes, a wrong size on a fixed axis, or a size that no value of its dimension gives.",
        "`cgcompile inspect` shows the shape of every input: named dimensions may vary, numbers may not"),
    "input-value": Cause("CallError", 2, "The call failed because an index in an input is out of range.",
        "the range is the size of the indexed tensor, such as an embedding or a table of positions"),
    "input-layout": Cause("CallError", 2,
        "An output is a view of an input, and the layout of this input does not allow the view.",
        "pass input.contiguous()"),
    "input-unwritable": Cause("CallError", 2,
        "The model writes to an input that is read-only, or that shares memory with another input or with itself.",
        "pass a writable tensor without overlaps, such as a .clone() or .copy()"),
    "dimension-disagrees": Cause("CallError", 2, "Two inputs have different sizes for the same declared dimension.",
        "pass inputs with the same size of this dimension"),
    "key-missing": Cause("CallError", 2,
        "The int_key was not recorded, and on_miss or the build does not allow to pad or chunk the call.",
        "call it at a recorded size, or build the bundle with more --sizes; `cgcompile inspect` shows why other sizes are "
        "refused, and `cgcompile explain padding` how to change the model"),
    "stale-view": Cause("CallError", 2, 'An output of `outputs="view"` was read after the next call.',
        'call .clone() before the next call, or load the bundle with outputs="copy"'),
    "program-closed": Cause("ProgramClosed", 2, "The program was closed.", "load the bundle again"),
    "session-busy": Cause("SessionBusy", 2, "Two threads used one session at once.",
        "use one session for each thread: program.session()"),
    "process-forked": Cause("CallError", 2,
        "The process was forked after the program was loaded, or after its parent ran code on the CPU or a GPU.",
        "load the bundle in the child before any call in the parent, or start processes by spawn"),
    "entry-missing": Cause("EntryMissing", 2, "The bundle has no entry of that name, or the call names none of several entries.",
        "`program.entries` lists them"),
    "state-missing": Cause("StateMissing", 2, "The model has no state of that name.",
        "`program.state` lists the names"),
    "state-invalid": Cause("CallError", 2, "A value for a state is not a tensor, or its dtype, shape or device is wrong.",
        "pass a tensor with the dtype and shape of `program.state[name]`"),
    "state-rows": Cause("CallError", 2, "The model's state cannot have this number of rows, or has no dimension of that name.",
        "`cgcompile inspect` lists the dimensions of the state, with the minimum number of rows of each"),
    "update-invalid": Cause("CallError", 2,
        "The weights for `program.update` are invalid: a wrong name, dtype or shape, a truncated file, or a missing weight.",
        "pass the weights of the model's state_dict; the program was not changed"),
    "update-refused": Cause("CallError", 2,
        "A weight cannot be updated: it is a constant, state, or the build used its value in the code.",
        "`cgcompile inspect` lists these weights; build the bundle again with the new values"),
    "self-test-crashed": Cause("BundleError", 1, "The process that replays the self-test ended without an answer.",
        "build the bundle again with the versions installed here; if the error stays, please report the model"),
    "self-test-outdated": Cause("CallError", 2,
        "The self-test needs the bundle's own weights, but the weights of this program were updated.",
        "load the bundle again to verify it; compare the updated program with eager PyTorch"),
    "capture-refused": Cause("CallError", 2,
        "The caller's stream is being captured into a CUDA graph, and this call cannot be part of it.",
        "call it outside the capture, or with tensors on the GPU and a bundle without host regions"),
}  # fmt: skip
