"""The catalogue of build errors, as `cgbundle.errors`.  Exit code 1: the model cannot be built; 2: usage or environment."""

from __future__ import annotations

from collections.abc import Mapping

from cgbundle import errors
from cgbundle.errors import Cause, CgbundleError


class BuildError(CgbundleError):
    """Building, checking or a tool failed: usage, environment, or a defect."""


class ModelError(BuildError):
    """The model cannot be built as it is."""


DEFECT = "this is a defect of cgcompile: please report the model"
OTHER_KERNELS = "other kernels may do: try --lower eager, or --record cross-compile; and please report the model"

CATALOGUE: Mapping[str, Cause] = {
    # --- the source ---
    "source-missing": Cause(BuildError, 2, "No such model file, module, attribute, or saved program.",
        "give a model.py, package.module:attribute, a saved program.pt2, a folder with config.json, or a .gguf file"),
    "source-invalid": Cause(ModelError, 1, "The model file fails, or lacks a sound model() or inputs().",
        "a model file defines model() -> torch.nn.Module, and inputs(), whose parameters are the dimensions"),
    "folder-invalid": Cause(ModelError, 1, "The folder of a language model lacks a file, or has one that does not fit the others.",
        "the message names the file; the folder has to be complete, in the Hub's layout"),
    "language-model-refused": Cause(ModelError, 1, "A language model would give other text from pages than transformers does.",
        "serve it with transformers; the page \"Support\" lists the families"),
    "sizes-invalid": Cause(BuildError, 2, "Sizes that are not distinct positive whole numbers, or of an undeclared dimension.",
        "--sizes 1,8,32, or --sizes NAME=1,8 for every declared dimension"),
    "too-many-keys": Cause(BuildError, 2, "The product of the sizes has more int_keys than are built without being asked.",
        "give fewer sizes (`cgcompile sizes` chooses them), or raise --max-keys"),
    "allow-unknown": Cause(BuildError, 2, "--allow names a rule that does not exist.",
        "`cgcompile explain` lists the rules of findings"),
    "option-invalid": Cause(BuildError, 2, "An option of a build has a word that it does not take.",
        "give one of the words that the message names, or leave the option out"),
    "progress-unknown": Cause(BuildError, 2, "Progress is to be shown in a way that there is not.", "leave progress out"),
    # --- the model ---
    "dimension-unused": Cause(ModelError, 1, "A declared dimension changes no shape of the inputs.",
        "use it in a shape, or remove the parameter of inputs()"),
    "shape-irregular": Cause(ModelError, 1,
        "An input's size is no multiple of one declared dimension plus a constant, or an output's follows no rule in them.",
        "let every axis be a multiple of one dimension plus a constant; pad what is not"),
    "size-excluded": Cause(ModelError, 1, "The model does not work for a declared size: export found a constraint, or it raised.",
        "give other sizes, or take out of the model what depends on that size"),
    "eager-failed": Cause(ModelError, 1, "The model fails in eager PyTorch, whatever the sizes: export was not tried.",
        "the model has to run with what inputs() gives, on the device that it is built on"),
    "data-dependent-shape": Cause(ModelError, 1, "A size depends on data in an operation that torch.export cannot follow.",
        "give the tensor a fixed size, padded, with a mask or its length as a tensor"),
    "export-failed": Cause(ModelError, 1, "torch.export cannot take the model; the message carries the user's file and line.",
        "change the line that the message names; torch.export.export(model, inputs) shows the same failure"),
    "fresh-failed": Cause(ModelError, 1,
        "A model that was not called before could not be made, or the process that calls it ended.",
        "the message says why; where memory is short, let one process have it"),
    "export-differs": Cause(ModelError, 1,
        "The program of torch.export computes something else than the model in eager PyTorch.",
        "look for what it does otherwise while it is traced (is_compiling, is_exporting), or try another version of its library"),
    "numpy-untraceable": Cause(ModelError, 1, "forward() computes with NumPy, which torch.export sees nothing of.",
        "write it with PyTorch's operations, or compute it outside of forward() and pass it as an input"),
    "data-dependent-branch": Cause(ModelError, 1,
        "Python branches on the value of a tensor in a way that no program can follow: a loop without a bound, too many paths.",
        "choose with torch.where or torch.cond, loop with torch.while_loop; make what never changes in forward()"),
    "structure-unsupported": Cause(ModelError, 1, "An input or output is of a type that a bundle cannot describe.",
        "use tensors, None, numbers, text, and tuples, lists, dicts, named tuples or dataclasses of them"),
    "data-dependent-output": Cause(ModelError, 1, "An output is a number of the host, or has a size that depends on data.",
        "return a tensor of a fixed size, padded where it is shorter, and the length as a tensor"),
    "state-changed": Cause(ModelError, 1, "forward() gives a buffer another dtype or shape, or writes to a tensor that is none.",
        "keep its dtype and shape from call to call"),
    "state-shared": Cause(ModelError, 1, "A tensor of the model that the program changes lies in the same memory as another one.",
        "clone one of the two when the model is made"),
    "dtype-unsupported": Cause(ModelError, 1, "A tensor has a dtype, layout or device that a bundle cannot hold.",
        "convert the tensor in the model to a dense one of another dtype"),
    "quantization-unsupported": Cause(ModelError, 1, "A module holds weights that are packed for a library, which are no tensors.",
        "quantize with torchao (quantize_, prepare_pt2e and convert_pt2e), or Linear layers alone with quantize_dynamic"),
    "constant-unknown": Cause(ModelError, 1, "Compiled code reads a constant that is neither an input nor a tensor of the model.",
        "register the tensor as a buffer of the model"),
    "check-refused": Cause(ModelError, 1, "A check of severity `refuse` fired, or --strict forbade a host region.",
        "change the line that is named; `cgcompile check` lists all findings with what to do"),
    "outputs-shared": Cause(ModelError, 1, "Outputs share memory in eager PyTorch in a way that a bundle cannot keep.",
        "clone the output in forward()"),
    "donation-unknown": Cause(ModelError, 1, "donations() names an output or an input that no entry has, or a pair twice.",
        "name them as entry.output and entry.input; `cgcompile inspect` lists both of a bundle"),
    "donation-unlike": Cause(ModelError, 1, "An output and the input that is to take it have no dtype and shape in common.",
        "give both the same dtype, and sizes at which they have the same shape"),
    "donation-refused": Cause(ModelError, 1, "An output cannot stay where a later call takes it: it is something else's memory.",
        "return a new tensor (x + 0, or x.clone()), or leave the pair out of donations(): then the input is copied in"),
    "operator-without-code": Cause(ModelError, 1, "A custom operator would need Python at run time, which a bundle does without.",
        "write it with torch.library.custom_op over PyTorch's own operations, or take it out of the model"),
    "fallback-op-unknown": Cause(BuildError, 2, "An operator that is to be kept on the host is none that the model calls.",
        "`cgcompile check` lists the operators of every region: name one as aten.topk or mylib::op"),
    # --- a log of request sizes ---
    "request-log-missing": Cause(BuildError, 2, "There is no such log of request sizes.",
        "give a file with one request size per line, a CSV file, or - for stdin"),
    "request-log-invalid": Cause(BuildError, 2, "A log holds no sizes, or something else than positive whole numbers.",
        "one positive whole number per line, or --column NAME of a CSV file"),
    "request-log-column-unknown": Cause(BuildError, 2, "A log has no column of that name, or several.",
        "give --column a name from the first line of the file"),
    "limit-invalid": Cause(BuildError, 2,
        "A number of capture sizes, their common factor, or the seconds of a proof or a search are too few.",
        "give --max and --multiple a number of 1 or more"),
    # --- the environment ---
    "extra-missing": Cause(BuildError, 2, "A package that building, push or pull needs is not installed.",
        "pip install 'torch>=2.11,<2.14' 'triton>=3.6,<3.8' numpy to build, fsspec to push and pull"),
    "torch-unsupported": Cause(BuildError, 2, "This torch lacks something that the compiler uses; the message names it.",
        "install a version of torch that cgcompile was tested with: 2.11 or 2.13"),
    "triton-unsupported": Cause(BuildError, 2, "Kernels for a GPU that is not there are not built with this version of Triton.",
        "pip install 'triton>=3.6,<3.8'"),
    "target-unavailable": Cause(BuildError, 2, "The target cannot be built for on this machine, or does not exist.",
        "name a target that can be built for here: cpu, or --target sm_90 and its kind, which is cross-compiled"),
    "size-decides": Cause(BuildError, 1, "torch compiles other code for some of the sizes than for the others.",
        "build the sizes that the message names apart, as bundles of their own; and please report the model"),
    "compiler-failed": Cause(BuildError, 1, "The C++ compiler, Inductor or Triton failed on the model.", "please report the model"),
    "not-standalone": Cause(BuildError, 1, "With --standalone, the code for the CPU calls what only torch's libraries have.",
        "leave --standalone out: the bundle then needs torch's libraries where it is served"),
    "cache-unsafe": Cause(BuildError, 2, "The folder where results are kept belongs to someone else, or others can write to it.",
        "chmod go-w it, or set CGCOMPILE_CACHE to a folder of your own"),
    "cache-unwritable": Cause(BuildError, 2, "The folder where results are kept cannot be made or written to.",
        "set CGCOMPILE_CACHE to a folder of your own"),
    "scratch-unwritable": Cause(BuildError, 2, "There is no folder for temporary files that can be written to.",
        "set TMPDIR to a folder of your own"),
    "disk-full": Cause(BuildError, 2, "The disk of the output, of temporary files, or of the cache is full.",
        "free some space, or set TMPDIR, CGCOMPILE_CACHE or -o to another disk"),
    "output-busy": Cause(BuildError, 2, "Another process is building a bundle of that name.",
        "wait until it has ended, or choose another name with -o"),
    "output-exists": Cause(BuildError, 2, "The destination exists, or came meanwhile, and --force was not given.",
        "give --force to replace it, or another name with -o"),
    "output-unwritable": Cause(BuildError, 2, "The destination's folder does not exist or cannot be written.",
        "choose another place with -o: a folder that exists and can be written to"),
    # --- bundles far away ---
    "remote-invalid": Cause(BuildError, 2, "A URL of a kind that fsspec does not know.",
        "give a folder, or a URL such as s3://bucket/classifier.cgb"),
    "remote-failed": Cause(BuildError, 2, "A folder or object store far away cannot be reached, read or written.",
        "see whether the URL and the credentials are right; what has travelled does not travel again"),
    # --- the end of a build ---
    "proof-failed": Cause(BuildError, 1,
        "The fresh process that verifies the bundle failed, or got other results than eager PyTorch: nothing was published.",
        "look whether the model computes the same twice in eager PyTorch; if it does, please report the model"),
    "bundle-refused": Cause(BuildError, 1,
        "What was built is beyond a limit of the format, or breaks an invariant of it: nothing was published.",
        "give fewer sizes or shorter names; where no limit was passed, please report the model"),
    "variants-differ": Cause(BuildError, 1,
        "Two targets of one build have other weights, or expect other outputs: they cannot be variants of one bundle.",
        "let model() give the same weights every time, or build a bundle for each target"),
    # --- a benchmark ---
    "baseline-unknown": Cause(BuildError, 2, "A benchmark is asked to compare with something that it does not know.",
        "give --against names from the list in the message"),
    "baseline-unwritable": Cause(BuildError, 1, "The bundle's program cannot be written as Python for PyTorch to run.",
        "give --model with your own model file"),
    "baseline-failed": Cause(BuildError, 1, "A baseline's process, or what prepares it, failed: the benchmark goes on without.",
        "its row says why; leave it out of --against, or give --model"),
    "bench-failed": Cause(BuildError, 2, "The bundle itself could not be measured here: its process ended with an error.",
        "`cgcompile verify BUNDLE --run` says what is wrong here"),
    # --- the partition ---
    "program-unsupported": Cause(ModelError, 1, "Regions cannot pass on objects, tokens, or new values of buffers and inputs.",
        "export the model again: the partitioner takes the programs that cgcompile exports"),
    "node-unknown": Cause(BuildError, 1, "A placement names a node that the program does not have.", DEFECT),
    "inputs-unlike": Cause(BuildError, 2, "The tensors of an int_key do not fit the program, or differ in shape from call to call.",
        "inputs() has to give the same shapes for the same sizes"),
    # --- capture: the environment ---
    "gpu-memory": Cause(BuildError, 2, "The model does not fit into the free memory of the GPU that it is built on.",
                        "end what else uses the GPU (nvidia-smi lists it), or build on one with more memory"),
    "cupti-unavailable": Cause(BuildError, 2, "libcupti was not found, or refused the subscription.",
        "install torch with its CUDA libraries (nvidia-cuda-cupti), and run without another profiler attached"),
    "driver-call-failed": Cause(BuildError, 2, "A CUDA driver call that the recorder needs failed.", errors.GPU_LOG),
    "recorder-failed": Cause(BuildError, 1, "A recorder process died without naming a reason; the message has its last line.",
        "the log has all that the process wrote; please report the model"),
    # --- capture: lowering and capturing ---
    "lowering-failed": Cause(ModelError, 1, "The program could not be lowered at this level.",
        "try --lower eager, or see `cgcompile check` for what has to be cut out of the graph"),
    "not-capturable": Cause(ModelError, 1,
        "The stream capture was broken: the program synchronizes, copies from unpinned host memory, or allocates while captured.",
        "`cgcompile check` names the operation; it has to run in a host region"),
    "random-operation": Cause(ModelError, 1, "Random numbers are drawn; a bundle would repeat the same ones on every replay.",
        "call model.eval(), or pass the random tensor as an input"),
    "input-mutated": Cause(ModelError, 1, "A replay changed an input that the program is not known to write to.",
        "return the changed tensor as an output, and please report this model"),
    "weight-mutated": Cause(ModelError, 1,
        "A replay changed a weight that the program is not known to write to; sessions share weights.",
        "register it as a buffer of the module, and please report this model"),
    # --- capture: what a graph may hold ---
    "node-refused": Cause(ModelError, 1, "A node of a kind that a bundle cannot hold; the message says which.", OTHER_KERNELS),
    "copy-refused": Cause(ModelError, 1, "A memcpy node of host memory, an array, or memory that is not ours.", OTHER_KERNELS),
    "attribute-refused": Cause(ModelError, 1, "A launch attribute that cannot be carried to another process.", OTHER_KERNELS),
    "parameters-unreadable": Cause(BuildError, 1, "A kernel's parameters have no layout, or lie in no known form.", OTHER_KERNELS),
    # --- capture: images ---
    "image-unseen": Cause(BuildError, 1, "No image was seen for a kernel's module, or several hold the symbol.", OTHER_KERNELS),
    "image-format": Cause(BuildError, 1, "An image is not a cubin ELF file, or a damaged one.", OTHER_KERNELS),
    "loader-unknown": Cause(BuildError, 1, "An image was loaded inside an unknown driver call, so that its module is unknown.",
        "report the driver call's name: the recorder has to learn where it holds the module"),
    # --- capture: the comparison of two recordings ---
    "recordings-differ": Cause(BuildError, 1, "Two processes recorded different nodes, kernels, grids or edges for the same key.",
        "the lowering is not deterministic: give both processes the same compile cache"),
    "address-disagrees": Cause(BuildError, 1, "Two recordings read a word as addresses of different places.", OTHER_KERNELS),
    "memory-refused": Cause(ModelError, 1, "An address of pinned host memory, or of too large an allocation.", OTHER_KERNELS),
    "pointer-in-table": Cause(ModelError, 1, "A table holds addresses; only parameters and variables are relocated.",
        OTHER_KERNELS),
    "module-state-differs": Cause(BuildError, 1, "A module variable differs in every process, and is no address.", OTHER_KERNELS),
    "module-state-unreadable": Cause(BuildError, 1, "A kernel may have changed a variable that has no handle.", OTHER_KERNELS),
    # --- offline: lowering ---
    "gpu-visible": Cause(BuildError, 2, "A process that lowers for an absent GPU sees a real one, which it must not touch.",
        "lower in a process of its own"),
    "operator-without-kernel": Cause(ModelError, 1, "No Triton kernel computes it, or the shape of its result depends on data.",
        "replace the operation in the model, or build on a machine with this GPU: library kernels are captured there"),
    "lowering-broken": Cause(BuildError, 1, "Inductor failed on the program, or its wrapper does something unknown.",
        "this may be a defect of cgcompile: please report the model"),
    "measurements-broken": Cause(BuildError, 1, "The table of measured configurations cannot be read; the message names the file.",
        "install cgcompile again"),
    # --- a model over several devices ---
    "world-refused": Cause(BuildError, 2, "A model, a target or an option that a build over several GPUs does not take.",
        "`--world N` takes a model file with model(rank, world), for one architecture, all of it in graphs"),
    "split-refused": Cause(BuildError, 1, "A model that cannot be split by its layers.",
        "give each GPU its share yourself: model(rank, world) with `--world N`, and no --split"),
    "collective-refused": Cause(ModelError, 1, "A collective of a dtype, or of a number of bytes, that its kernels do not take.",
        "cast before it, or pad: sums are of bfloat16, float16 or float32, and each rank gets a multiple of 16 bytes"),
    "collectives-unlike": Cause(ModelError, 1, "The ranks of a model do not call the same collectives in the same order.",
        "let what model(rank, world) gives differ in its weights, not in what it calls"),
    # --- offline: compiling ---
    "kernel-failed": Cause(BuildError, 1, "Triton or ptxas could not compile a kernel; the message has the compiler's first line.",
        "please report the kernel's source: it was made for this architecture and should compile"),
    "kernel-too-large": Cause(BuildError, 1, "A kernel needs more shared or tensor memory than a block of the target may have.",
        "take a configuration with smaller blocks or fewer stages"),
    "kernel-unsupported": Cause(BuildError, 1, "A kernel needs what a bundle does not give: scratch memory, tensor descriptors.",
        "take another configuration of this kernel"),
    "worker-died": Cause(BuildError, 1, "A process that compiles, interprets or times kernels ended without an answer.", DEFECT),
    # --- offline: the arena and the rows ---
    "lifetime-broken": Cause(BuildError, 1, "A buffer is used outside its lifetime, or allocated twice.", DEFECT),
    "arena-overlap": Cause(BuildError, 1, "Two buffers share bytes of the arena while both are needed: the plan is wrong.", DEFECT),
    "place-invalid": Cause(BuildError, 1, "A buffer has no place, or one that is not aligned or not inside its memory.", DEFECT),
    "parameter-mismatch": Cause(BuildError, 1, "An argument does not fit its parameter: size, type, number, alignment.", DEFECT),
    "order-broken": Cause(BuildError, 1, "A recording's rows stand in no order that its edges allow.", DEFECT),
    # --- offline: interpreting ---
    "function-not-interpretable": Cause(BuildError, 1, "A kernel uses a function that the interpreter cannot do on the CPU.",
        "the recording cannot be proved on this machine: build where the target GPU is, or report the function"),
    "access-outside": Cause(BuildError, 1, "A kernel's access lies outside the bundle's memories or is not aligned.", DEFECT),
    "kernel-asserted": Cause(ModelError, 1, "An assertion failed in an interpreted kernel, or a promise to the compiler.",
        "an index of the example inputs may be out of range: look at inputs()"),
    "kernel-unreadable": Cause(BuildError, 1, "A kernel's source is no Python, lacks the kernel, or fails when run.", DEFECT),
}  # fmt: skip

BuildError.catalogue = CATALOGUE


def named(code: str, message: str, hint: str) -> CgbundleError:
    """The error that another process named by its code."""
    cause = CATALOGUE.get(code) or errors.CATALOGUE[code]
    return cause.error(code, message, hint)
