"""The catalogue of build errors: two classes that callers catch, a code per cause.  See `cgbundle.errors` for how one reads.

Exit code 1: the model has findings or cannot be built; 2: usage or environment.
"""

from __future__ import annotations

from collections.abc import Mapping

from cgbundle import errors
from cgbundle.errors import Cause, CgbundleError


class BuildError(CgbundleError):
    """Building, checking or a tool failed: usage, environment, or a defect."""


class ModelError(BuildError):
    """The model cannot be built as it is."""


DEFECT = "this is a defect of cgcompile: please report the model"
OTHER_KERNELS = "other kernels may do: try --lower eager, or --record trace; and please report the model"

CATALOGUE: Mapping[str, Cause] = {
    # --- the source ---
    "source-missing": Cause(BuildError, 2, "No such model file, module, attribute, or saved program."),
    "source-invalid": Cause(ModelError, 1,
        "The model file cannot be run, or lacks model() or inputs(), or these do not return what they should."),
    "sizes-invalid": Cause(BuildError, 2,
        "Sizes that are not distinct positive whole numbers, or name a dimension that inputs() does not declare."),
    "too-many-keys": Cause(BuildError, 2, "The product of the sizes has more int_keys than are built without being asked."),
    # --- the model ---
    "dimension-unused": Cause(ModelError, 1, "A declared dimension changes no shape of the inputs."),
    "shape-irregular": Cause(ModelError, 1, "An input's size is no multiple of one declared dimension plus a constant."),
    "size-excluded": Cause(ModelError, 1,
        "The model does not work for a declared size: export found a constraint, or the model raised."),
    "export-failed": Cause(ModelError, 1, "torch.export cannot take the model; the message carries the user's file and line."),
    "branch-on-data": Cause(ModelError, 1,
        "Python branches on the value of a tensor: an exported program has one of the branches only."),
    "structure-unsupported": Cause(ModelError, 1, "An input or output is of a type that a bundle cannot describe."),
    "data-dependent-output": Cause(ModelError, 1, "An output is a number of the host, or has a size that depends on data.",
        "return a tensor of a fixed size, padded where it is shorter, and the length as a tensor"),
    "state-changed": Cause(ModelError, 1, "forward() gives a buffer another dtype or shape: state has a fixed place.",
        "keep its dtype and shape from call to call"),
    "dtype-unsupported": Cause(ModelError, 1, "A tensor has a dtype, layout or device that a bundle cannot hold."),
    "constant-unknown": Cause(ModelError, 1,
        "Compiled code reads a constant that is neither an input nor one of the model's parameters, buffers and constants.",
        "register the tensor as a buffer of the model"),
    "check-refused": Cause(ModelError, 1,
        "A check with severity `refuse` fired and was not waived, or --strict turned a host region into an error."),
    "outputs-shared": Cause(ModelError, 1,
        "Outputs share memory with something else in eager PyTorch, in a way that a bundle cannot keep.",
        "clone the output in forward()"),
    "operator-without-code": Cause(ModelError, 1,
        "A custom operator would have to be called through Python at run time, which a bundle does without.",
        "write it with torch.library.custom_op over PyTorch's own operations, or take it out of the model"),
    "host-op-unknown": Cause(BuildError, 2, "An operator that is to be kept on the host is none that the model calls."),
    # --- a log of request sizes ---
    "request-log-missing": Cause(BuildError, 2, "There is no such log of request sizes."),
    "request-log-invalid": Cause(BuildError, 2,
        "A log holds no sizes, or something else than positive whole numbers; the message gives the line."),
    "request-log-column-unknown": Cause(BuildError, 2,
        "A log has no column of that name, or several; the message lists the columns."),
    "limit-invalid": Cause(BuildError, 2,
        "The number of capture sizes to propose, or what they are to be multiples of, is below 1."),
    # --- the environment ---
    "extra-missing": Cause(BuildError, 2, "A package that building needs is not installed."),
    "torch-unsupported": Cause(BuildError, 2,
        "This torch lacks something that the compiler uses; the message names it and the versions it was tested on."),
    "target-unavailable": Cause(BuildError, 2, "The target cannot be built for on this machine, or does not exist."),
    "compiler-failed": Cause(BuildError, 1, "The C++ compiler, Inductor or Triton failed on the model.", "please report the model"),
    "cache-unsafe": Cause(BuildError, 2, "The folder where results are kept belongs to someone else, or others can write to it.",
        "chmod go-w it, or set CGCOMPILE_CACHE to a folder of your own"),
    "output-exists": Cause(BuildError, 2, "The destination exists and --force was not given."),
    "output-unwritable": Cause(BuildError, 2, "The destination's folder does not exist or cannot be written."),
    "proof-failed": Cause(BuildError, 1,
        "The fresh process that verifies the bundle failed, or got other results than eager PyTorch: nothing was published."),
    # --- a benchmark ---
    "peer-unknown": Cause(BuildError, 2,
        "A benchmark is asked to compare with something that it does not know; the message lists what it knows."),
    "peer-unwritable": Cause(BuildError, 1,
        "The bundle's program cannot be written as Python for PyTorch to run it beside the bundle.",
        "give --model with your own model file"),
    "peer-failed": Cause(BuildError, 1,
        "The process of a peer, or what prepares it, ended with an error: the benchmark goes on without it."),
    "bench-failed": Cause(BuildError, 2, "The bundle itself could not be measured here: its process ended with an error."),
    # --- the partition ---
    "program-unsupported": Cause(ModelError, 1,
        "The program has inputs or outputs that regions cannot pass on: objects, tokens, or new values of buffers and inputs.",
        "export the model again: the partitioner takes the programs that cgcompile exports"),
    "node-unknown": Cause(BuildError, 1, "A placement names a node that the program does not have.", DEFECT),
    "inputs-unlike": Cause(BuildError, 2,
        "The tensors of a key do not fit the program's inputs, or do not decide all of its sizes."),
    # --- capture: the environment ---
    "cupti-unavailable": Cause(BuildError, 2, "libcupti was not found, or refused the subscription.",
        "install torch with its CUDA libraries (nvidia-cuda-cupti), and run without another profiler attached"),
    "driver-call-failed": Cause(BuildError, 2, "A CUDA driver call that the recorder needs failed.", errors.GPU_LOG),
    "recorder-failed": Cause(BuildError, 1,
        "A recorder process died without naming a reason; the message gives the last line it wrote and the log's path.",
        "the log has all that the process wrote; please report the model"),
    # --- capture: lowering and capturing ---
    "lowering-failed": Cause(ModelError, 1, "The program could not be lowered at this level.",
        "try --lower eager, or see `cgcompile check` for what has to be cut out of the graph"),
    "not-capturable": Cause(ModelError, 1,
        "The stream capture was broken: the program synchronizes, copies from unpinned host memory, or allocates while captured.",
        "`cgcompile check` names the operation; it has to run in a host region"),
    "randomness-refused": Cause(ModelError, 1,
        "The program draws random numbers; a bundle would repeat the same ones on every replay.",
        "call model.eval(), or pass the random tensor as an input"),
    "input-mutated": Cause(ModelError, 1,
        "A replay changed an input that the program is not known to write to; a bundle would not hand the change back.",
        "return the changed tensor as an output, and please report this model"),
    "weight-mutated": Cause(ModelError, 1,
        "A replay changed a weight that the program is not known to write to; sessions share weights.",
        "register it as a buffer of the module, and please report this model"),
    "shared-storage": Cause(ModelError, 1,
        "A buffer that the program changes overlaps another weight, so that placing the two apart would break the link.",
        "give the buffer a tensor of its own"),
    "sizes-differ": Cause(BuildError, 2,
        "The inputs of one int_key do not fit the program's signature, or two sets of inputs for one key differ in shape.",
        "inputs() has to give the same shapes for the same sizes"),
    # --- capture: what a graph may hold ---
    "node-refused": Cause(ModelError, 1, "A node of a kind that a bundle cannot hold; the message says which and why.",
        OTHER_KERNELS),
    "copy-refused": Cause(ModelError, 1, "A memcpy node that reads or writes host memory, an array, or a memory that is not ours.",
        OTHER_KERNELS),
    "attribute-refused": Cause(ModelError, 1, "A launch attribute that cannot be carried to another process.", OTHER_KERNELS),
    "parameters-unreadable": Cause(BuildError, 1,
        "A kernel node without a parameter layout, or whose parameters lie in neither of the two known forms.", OTHER_KERNELS),
    # --- capture: images ---
    "image-unseen": Cause(BuildError, 1, "No image was seen for the module of a kernel, or several that hold the symbol.",
        OTHER_KERNELS),
    "image-format": Cause(BuildError, 1, "An image is not a cubin ELF file, or a damaged one.", OTHER_KERNELS),
    "loader-unknown": Cause(BuildError, 1,
        "An image was loaded inside a driver call that the recorder does not know, so that its module is unknown.",
        "report the driver call's name: the recorder has to learn where it holds the module"),
    # --- capture: the comparison of two recordings ---
    "recordings-differ": Cause(BuildError, 1,
        "Two processes recorded different graphs for the same key: number of nodes, kernels, images, grids, edges or attributes.",
        "the lowering is not deterministic: give both processes the same compile cache"),
    "address-disagrees": Cause(BuildError, 1, "A word is an address of ours in both recordings, but not of the same place.",
        OTHER_KERNELS),
    "memory-refused": Cause(ModelError, 1,
        "A word is an address of memory that a bundle cannot hold: pinned host memory, or an allocation that is too large.",
        OTHER_KERNELS),
    "pointer-in-table": Cause(ModelError, 1,
        "A table that a kernel reads holds addresses itself; only parameters and module variables are relocated.", OTHER_KERNELS),
    "module-state-differs": Cause(BuildError, 1,
        "A module variable has another value in every process, and the difference is no address that could be relocated.",
        OTHER_KERNELS),
    "module-state-unreadable": Cause(BuildError, 1, "A module variable that a kernel may have changed has no handle to read it by.",
        OTHER_KERNELS),
    # --- offline: lowering ---
    "gpu-visible": Cause(BuildError, 2, "A process that lowers for an absent GPU sees a real one, which it must not touch.",
        "lower in a process of its own"),
    "operation-needs-gpu": Cause(ModelError, 1,
        "A library would compute this operation, not Triton, or its result's shape depends on data.",
        "replace the operation in the model, or build on a machine with this GPU: library kernels are captured there"),
    "input-changed": Cause(ModelError, 1,
        "The program writes into one of its inputs; a bundle could not hand the change back to the caller.",
        "return the changed tensor as an output"),
    "state-shared": Cause(ModelError, 1, "A tensor of the model that the program changes lies in the same memory as another one.",
        "clone one of the two when the model is made"),
    "sizes-unlike": Cause(BuildError, 2, "The tensors of a call do not fit the program's inputs.", DEFECT),
    "lowering-broken": Cause(BuildError, 1,
        "Inductor failed on the program, or wrote a wrapper that does something unknown; the message has its first line.",
        "this may be a defect of cgcompile: please report the model"),
    "measurements-broken": Cause(BuildError, 1, "The table of measured configurations cannot be read; the message names the file.",
        "install cgcompile again"),
    # --- offline: compiling ---
    "kernel-failed": Cause(BuildError, 1,
        "Triton or ptxas could not compile a kernel; the message names it and gives the compiler's first line.",
        "please report the kernel's source: it was made for this architecture and should compile"),
    "kernel-too-large": Cause(BuildError, 1, "A kernel needs more shared or tensor memory than a block of the target may have.",
        "take a configuration with smaller blocks or fewer stages"),
    "kernel-unsupported": Cause(BuildError, 1,
        "A compiled kernel needs something at its launch that a bundle does not give: scratch memory, tensor descriptors.",
        "take another configuration of this kernel"),
    "worker-died": Cause(BuildError, 1,
        "A process that compiles or interprets kernels ended without an answer; the message gives the last line that it wrote.",
        DEFECT),
    # --- offline: the arena and the rows ---
    "lifetime-broken": Cause(BuildError, 1,
        "A buffer is used before it was allocated or after it was released, or allocated twice.", DEFECT),
    "arena-overlap": Cause(BuildError, 1, "Two buffers share bytes of the arena while both are needed: the plan is wrong.", DEFECT),
    "place-invalid": Cause(BuildError, 1, "A buffer has no place, or one that is not aligned or not inside its memory.", DEFECT),
    "parameter-mismatch": Cause(BuildError, 1,
        "An argument does not fit the kernel's parameter: another size, type, number of arguments or alignment.", DEFECT),
    "order-broken": Cause(BuildError, 1, "A recording's rows do not stand in an order in which its edges allow them to run.",
        DEFECT),
    # --- offline: interpreting ---
    "function-not-interpretable": Cause(BuildError, 1,
        "A kernel uses a function that the interpreter cannot do on the CPU; the message names the function and the kernel.",
        "the recording cannot be proved on this machine: build where the target GPU is, or report the function"),
    "access-outside": Cause(BuildError, 1,
        "A kernel reads or writes memory outside the bundle's memories, or at an address that is not aligned.", DEFECT),
    "kernel-asserted": Cause(ModelError, 1,
        "An assertion failed in an interpreted kernel: an index out of range, or a broken promise to the compiler.",
        "an index of the example inputs may be out of range: look at inputs()"),
    "kernel-unreadable": Cause(BuildError, 1,
        "The source of a kernel is no Python, does not define the kernel, or fails when the interpreter runs it.", DEFECT),
}  # fmt: skip

BuildError.catalogue = CATALOGUE


def named(code: str, message: str, hint: str) -> CgbundleError:
    """The error that another process named by its code."""
    cause = CATALOGUE.get(code) or errors.CATALOGUE[code]
    return cause.error(code, message, hint)
