"""The catalogue of build errors, in the form of `cgbundle.catalogue`.  Exit code 1: the model cannot be built; 2: usage or
environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cgbundle import catalogue, errors
from cgbundle.catalogue import Cause
from cgbundle.errors import CgbundleError


class BuildError(CgbundleError):
    """A build, a check or a tool failed: wrong usage, a problem of the environment, or a defect of cgcompile."""

    @classmethod
    def _causes(cls) -> Mapping[str, Cause]:
        return CATALOGUE


class ModelError(BuildError):
    """The model cannot be built as it is."""


DEFECT = "this is a defect of cgcompile: please report the model"
OTHER_KERNELS = "use other kernels: try --lower eager, or --record cross-compile; and please report the model"

CATALOGUE: Mapping[str, Cause] = {
    # --- the source ---
    "source-missing": Cause("BuildError", 2, "The model file, module, attribute or saved program does not exist.",
        "give a model.py, package.module:attribute, a saved program.pt2, a folder with config.json, or a .gguf file"),
    "source-invalid": Cause("ModelError", 1, "The model file raises an error, or has no valid model() or inputs().",
        "a model file defines model() -> torch.nn.Module, and inputs(), whose parameters are the dimensions"),
    "folder-invalid": Cause("ModelError", 1,
        "The folder of a language model lacks a file, or one of its files does not match the others.",
        "the message names the file; the folder must be complete, in the layout of the Hugging Face Hub"),
    "language-model-refused": Cause("ModelError", 1, "The bundle of a language model would write another text than transformers.",
        'serve it with transformers; the page "Support" lists the families'),
    "sizes-invalid": Cause("BuildError", 2, "The sizes are not distinct positive integers, or belong to an undeclared dimension.",
        "--sizes 1,8,32, or --sizes NAME=1,8 for every declared dimension"),
    "too-many-keys": Cause("BuildError", 2, "The product of the sizes is larger than --max-keys.",
        "give fewer sizes (`cgcompile sizes` chooses them), or raise --max-keys"),
    "allow-unknown": Cause("BuildError", 2, "--allow names a rule that does not exist.",
        "`cgcompile explain` lists the rules of findings"),
    "option-invalid": Cause("BuildError", 2, "An option of a build has an unknown value.",
        "use one of the values in the message, or leave the option out"),
    "progress-unknown": Cause("BuildError", 2, "`progress` has an unknown value.",
        'use "bar", "silent" or a function, or leave progress out'),
    # --- the model ---
    "dimension-unused": Cause("ModelError", 1, "A declared dimension changes no shape of the inputs.",
        "use it in a shape, or remove the parameter of inputs()"),
    "shape-irregular": Cause("ModelError", 1,
        "The size of an input is not a multiple of one declared dimension plus a constant, or the size of an output follows no "
        "rule.",
        "let every axis be a multiple of one dimension plus a constant; pad other axes to a fixed size"),
    "size-excluded": Cause("ModelError", 1,
        "The model does not work for a declared size: it raised an error, or export found a constraint.",
        "use other sizes, or remove the code that depends on the size"),
    "eager-failed": Cause("ModelError", 1, "The model fails in eager PyTorch at all sizes. It was not exported.",
        "the model must run with the result of inputs(), on the device of the build"),
    "data-dependent-shape": Cause("ModelError", 1, "A size depends on data, in an operation that torch.export cannot follow.",
        "pad the tensor to a fixed size, with a mask, or with its length as a tensor"),
    "export-failed": Cause("ModelError", 1, "torch.export cannot export the model. The message has the file and line of the model.",
        "change the line that the message names; torch.export.export(model, inputs) shows the same failure"),
    "fresh-failed": Cause("ModelError", 1,
        "The build could not make a new copy of the model, or the process that called the copy ended.",
        "the message has the cause; if memory is short, end other programs"),
    "export-differs": Cause("ModelError", 1, "The program of torch.export computes another result than the model in eager PyTorch.",
        "look for code that depends on tracing (is_compiling, is_exporting, type(x) == torch.Tensor, which isinstance() replaces), "
        "or try another version of the model's library"),
    "numpy-untraceable": Cause("ModelError", 1, "forward() computes with NumPy, which torch.export cannot trace.",
        "use operations of PyTorch, or compute the value outside of forward() and pass it as an input"),
    "data-dependent-branch": Cause("ModelError", 1,
        "Python branches on the value of a tensor, and not all paths can be exported: a loop has no bound, or there are too many "
        "paths.",
        "use torch.where or torch.cond, and torch.while_loop for loops; create constant tensors inside forward()"),
    "structure-unsupported": Cause("ModelError", 1, "An input or output has a type that a bundle cannot describe.",
        "use tensors, None, numbers, strings, and tuples, lists, dicts, named tuples or dataclasses of them"),
    "data-dependent-output": Cause("ModelError", 1,
        "An output is a Python number that depends on data, or its size depends on data.",
        "return a tensor of a fixed size, padded if necessary, and its length as a tensor"),
    "state-changed": Cause("ModelError", 1,
        "forward() gives a buffer another dtype or shape, or changes an attribute or a tensor that is not a buffer.",
        "the message says which: let a buffer keep its dtype and shape in every call; register anything else that forward() "
        "changes as a buffer, and write to that"),
    "state-shared": Cause("ModelError", 1, "A tensor that the program changes shares memory with another tensor of the model.",
        "clone one of the two in model()"),
    "dtype-unsupported": Cause("ModelError", 1, "A bundle cannot hold the dtype, layout or device of a tensor.",
        "convert the tensor in the model to a dense tensor of another dtype"),
    "quantization-unsupported": Cause("ModelError", 1,
        "The weights of a module are packed objects of a quantization library, not tensors.",
        "quantize with torchao (quantize_, prepare_pt2e and convert_pt2e), or only Linear layers with quantize_dynamic"),
    "constant-unknown": Cause("ModelError", 1, "Compiled code reads a constant that is not an input and not a tensor of the model.",
        "register the tensor as a buffer of the model"),
    "check-refused": Cause("ModelError", 1, "A check found an operation that is refused, or --strict does not allow a host region.",
        "change the line in the message; `cgcompile check` lists all findings and what to do"),
    "outputs-shared": Cause("ModelError", 1, "Outputs share memory in eager PyTorch in a way that a bundle does not support.",
        "clone the output in forward()"),
    "donation-unknown": Cause("ModelError", 1, "donations() names an unknown output or input, or has a pair twice.",
        "write names as entry.output and entry.input; `cgcompile inspect` lists those of a bundle"),
    "donation-unlike": Cause("ModelError", 1, "A donated output and its input never have the same dtype and shape.",
        "use the same dtype, and sizes at which the shapes are equal"),
    "donation-refused": Cause("ModelError", 1,
        "An output cannot be donated, because it shares memory with an input, a buffer or another tensor.",
        "return a new tensor (x + 0, or x.clone()), or remove the pair from donations(): then the input is copied"),
    "state-refused": Cause("ModelError", 1,
        "The number of rows of a buffer cannot be chosen at the load, because the model uses all rows or their number.",
        "index the rows, x[index] and x[index] = rows; or remove the buffer from state(): then the model sets its size"),
    "operator-without-code": Cause("ModelError", 1, "A custom operator needs Python at run time, which a bundle does not have.",
        "write it with torch.library.custom_op and PyTorch's operations, or remove it from the model"),
    "fallback-op-unknown": Cause("BuildError", 2, "--fallback-op names an operator that the model does not call.",
        "`cgcompile check` lists the operators of every region; write aten.topk or mylib::op"),
    # --- a log of request sizes ---
    "request-log-missing": Cause("BuildError", 2, "The log of request sizes does not exist.",
        "give a file with one request size per line, a CSV file, or - for stdin"),
    "request-log-invalid": Cause("BuildError", 2, "The log has no sizes, or has values that are not positive integers.",
        "write one positive integer in each line, or give --column NAME of a CSV file"),
    "request-log-column-unknown": Cause("BuildError", 2, "The log has no column of that name, or has it more than once.",
        "give --column a name of the first line of the file"),
    "limit-invalid": Cause("BuildError", 2,
        "A limit is too small: a number of sizes, their common factor, or the seconds of a proof or a search.",
        "use a value of 1 or more"),
    # --- the environment ---
    "extra-missing": Cause("BuildError", 2, "A package that is needed to build, push or pull is not installed.",
        "pip install 'torch>=2.11,<2.14' 'triton>=3.6,<3.8' numpy to build, fsspec to push and pull"),
    "torch-unsupported": Cause("BuildError", 2,
        "This version of torch lacks an interface that the compiler uses. The message names it.",
        "install a tested version of torch: 2.11 or 2.13"),
    "triton-unsupported": Cause("BuildError", 2, "This version of Triton cannot cross-compile.",
        "pip install 'triton>=3.6,<3.8'"),
    "target-unavailable": Cause("BuildError", 2, "The target does not exist, or this machine cannot build for it.",
        "use --target cpu, or cross-compile with --target sm_90 or another architecture; `cgcompile targets` lists all"),
    "size-decides": Cause("BuildError", 1, "torch compiles different code for some of the sizes.",
        "build one bundle for each group of sizes in the message, and please report the model"),
    "compiler-failed": Cause("BuildError", 1, "The C++ compiler, Inductor or Triton failed for this model.",
        "please report the model"),
    "not-standalone": Cause("BuildError", 1, "With --standalone: the CPU code calls functions that only torch's libraries have.",
        "leave --standalone out: the bundle then needs torch's libraries to serve"),
    "cache-unsafe": Cause("BuildError", 2, "The folder of the cache belongs to another user, or other users can write to it.",
        "run chmod go-w on it, or set CGCOMPILE_CACHE to a folder of your own"),
    "cache-unwritable": Cause("BuildError", 2, "The folder of the cache cannot be created or written to.",
        "set CGCOMPILE_CACHE to a folder of your own"),
    "scratch-unwritable": Cause("BuildError", 2, "No folder for temporary files is writable.",
        "set TMPDIR to a folder of your own"),
    "disk-full": Cause("BuildError", 2, "The disk of the output, of temporary files, or of the cache is full.",
        "free some space, or set TMPDIR, CGCOMPILE_CACHE or -o to another disk"),
    "output-busy": Cause("BuildError", 2, "Another process is building a bundle at this path.",
        "wait for it, or choose another path with -o"),
    "output-exists": Cause("BuildError", 2, "The destination exists, and --force was not given.",
        "give --force to replace it, or another path with -o"),
    "output-unwritable": Cause("BuildError", 2, "The folder of the destination does not exist or is not writable.",
        "choose an existing, writable folder with -o"),
    # --- remote bundles ---
    "remote-invalid": Cause("BuildError", 2, "fsspec does not support this kind of URL.",
        "give a folder, or a URL such as s3://bucket/classifier.cgb"),
    "remote-failed": Cause("BuildError", 2, "The remote folder or object store cannot be reached, read or written.",
        "check the URL and the credentials, then run the command again: it continues with the missing files"),
    # --- verification and publishing ---
    "proof-failed": Cause("BuildError", 1,
        "The verification in a fresh process failed, or its results differ from eager PyTorch. The bundle was not published.",
        "check whether the model gives the same result twice in eager PyTorch; if it does, please report the model"),
    "bundle-refused": Cause("BuildError", 1,
        "The bundle exceeds a limit of the format, or breaks a rule of it. It was not published.",
        "use fewer sizes or shorter names; if no limit is exceeded, please report the model"),
    "variants-differ": Cause("BuildError", 1,
        "Two targets of one build have different weights or expected outputs, so they cannot be variants of one bundle.",
        "return the same weights from model() every time, or build one bundle for each target"),
    # --- a benchmark ---
    "baseline-unknown": Cause("BuildError", 2, "--against names an unknown baseline.",
        "use names of the list in the message"),
    "baseline-unwritable": Cause("BuildError", 1, "The bundle's program cannot be written as Python code for PyTorch.",
        "give --model with your own model file"),
    "baseline-failed": Cause("BuildError", 1,
        "The process of a baseline, or its preparation, failed. The benchmark continues without it.",
        "its row has the cause; remove it from --against, or give --model"),
    "bench-failed": Cause("BuildError", 2, "The bundle could not be measured: its process ended with an error.",
        "`cgcompile verify BUNDLE --run` shows the cause"),
    # --- the partition ---
    "program-unsupported": Cause("ModelError", 1,
        "The program passes an object, a token, or a new value of a buffer or input from one region to another.",
        "export the model again with cgcompile: other exported programs are not supported"),
    "node-unknown": Cause("BuildError", 1, "A placement names a node that is not in the program.", DEFECT),
    "inputs-unlike": Cause("BuildError", 2,
        "The tensors of an int_key do not match the program, or their shapes change from call to call.",
        "inputs() must return the same shapes for the same sizes"),
    # --- capture: the environment ---
    "gpu-memory": Cause("BuildError", 2, "The model does not fit into the free memory of this GPU.",
        "end other processes on the GPU (nvidia-smi lists them), or build on a GPU with more memory"),
    "cupti-unavailable": Cause("BuildError", 2, "libcupti was not found, or another profiler is attached.",
        "install torch with its CUDA libraries (nvidia-cuda-cupti), and run without other profilers"),
    "driver-call-failed": Cause("BuildError", 2, "A CUDA driver call of the recorder failed.", catalogue.GPU_LOG),
    "recorder-failed": Cause("BuildError", 1,
        "A recorder process ended without an error message. The message has its last line of output.",
        "the log has the whole output of the process; please report the model"),
    # --- capture: lowering and capturing ---
    "lowering-failed": Cause("ModelError", 1, "The program could not be compiled with this --lower option.",
        "try --lower eager, or run `cgcompile check` to find the operation"),
    "not-capturable": Cause("ModelError", 1,
        "The stream capture failed: the program synchronizes, copies from unpinned host memory, or allocates during the capture.",
        "`cgcompile check` names the operation; it must run in a host region"),
    "random-operation": Cause("ModelError", 1, "The model draws random numbers, which would be the same in every replay.",
        "call model.eval(), or pass the random tensor as an input"),
    "input-mutated": Cause("ModelError", 1, "A replay changed an input, but the exported program does not write to it.",
        "return the changed tensor as an output, and please report the model"),
    "weight-mutated": Cause("ModelError", 1,
        "A replay changed a weight, but the exported program does not write to it. Sessions share weights.",
        "register it as a buffer of the module, and please report the model"),
    # --- capture: what a graph may hold ---
    "node-refused": Cause("ModelError", 1,
        "A bundle does not support this kind of graph node. The message names it.", OTHER_KERNELS),
    "copy-refused": Cause("ModelError", 1, "A memcpy node uses host memory, an array, or memory outside torch's allocator.",
        OTHER_KERNELS),
    "attribute-refused": Cause("ModelError", 1, "A launch attribute is valid only in this process.", OTHER_KERNELS),
    "parameters-unreadable": Cause("BuildError", 1, "The layout of a kernel's parameters is missing or unknown.", OTHER_KERNELS),
    # --- capture: images ---
    "image-unseen": Cause("BuildError", 1,
        "The recorder did not see the image of a kernel's module, or several images define its symbol.", OTHER_KERNELS),
    "image-format": Cause("BuildError", 1, "A kernel image is damaged, or is not a cubin ELF file.", OTHER_KERNELS),
    "loader-unknown": Cause("BuildError", 1, "An unknown driver call loaded an image, so the module of the image is unknown.",
        "please report the name of the driver call"),
    # --- capture: the comparison of two recordings ---
    "recordings-differ": Cause("BuildError", 1,
        "Two processes recorded different nodes, kernels, grids or edges for the same int_key.",
        "the compilation is not deterministic: use the same compile cache in both processes"),
    "address-disagrees": Cause("BuildError", 1, "A parameter is an address in both recordings, but of different tensors.",
        OTHER_KERNELS),
    "memory-refused": Cause("ModelError", 1,
        "A kernel uses pinned host memory, or an allocation that is too large.", OTHER_KERNELS),
    "pointer-in-table": Cause("ModelError", 1,
        "A table holds addresses. Only addresses in parameters and variables can be relocated.", OTHER_KERNELS),
    "module-state-differs": Cause("BuildError", 1, "A module variable differs between processes, and is not an address.",
        OTHER_KERNELS),
    "module-state-unreadable": Cause("BuildError", 1,
        "A module variable was changed, or kernels can change it, but the driver gives no address of it.", OTHER_KERNELS),
    # --- graphs that another program captured ---
    "not-observed": Cause("BuildError", 2, "save_graphs needs all kernel images of the process, but observe() was not called.",
        "call cgcompile.observe() before anything uses CUDA"),
    "observe-late": Cause("BuildError", 2, "observe() was called after CUDA had started, so earlier images are unknown.",
        "call cgcompile.observe() first, before any tensor is on a GPU"),
    "graph-refused": Cause("BuildError", 2, "An object in `graphs` is not a graph that can be saved, or its key is not supported.",
        "capture into torch.cuda.CUDAGraph(keep_graph=True); a key is a number, a string, or a tuple of these"),
    "tensor-refused": Cause("BuildError", 2, "An object in `tensors` is not a dense tensor on the current GPU.",
        "pass dense torch tensors of the GPU on which the graphs were captured"),
    "memory-unnamed": Cause("ModelError", 1,
        "A kernel uses memory that is not in `tensors` and was not allocated during a capture.",
        "add the tensor to `tensors`; random numbers are not supported; for cuBLAS's workspace, call "
        "torch._C._cuda_clearCublasWorkspaces() before the captures"),
    "pointer-in-tensor": Cause("ModelError", 1, "Memory of the graphs holds addresses, which cannot be relocated.",
        "pass addresses as kernel parameters, or use indices into one tensor; remove tensors that no kernel dereferences"),
    "engine-differs": Cause("BuildError", 1, "The two processes that saved graphs had different keys, tensors or versions.",
        "run the engine once more in the same way: its graphs are compared with the recording of this process"),
    "addresses-equal": Cause("BuildError", 2,
        "An allocation had the same address in both processes, so its pointers cannot be found by comparison.",
        "start the second process again; address space layout randomization must be on"),
    "engine-recording-invalid": Cause("BuildError", 2, "The recording of the first process cannot be read.",
        "remove the .recording file, and save the graphs in two processes again"),
    "replays-differ": Cause("BuildError", 1, "Two replays of one captured graph have different results.",
        "write the inputs in prepare=, leave out graphs that are not deterministic, or save with verify=False"),
    "not-verifiable": Cause("BuildError", 2,
        "A fresh process cannot replay the graphs: there is too little GPU memory, or it cannot open a tensor's memory.",
        "save with a smaller cache, or with verify=False: attach then needs unverified=True"),
    # --- offline: lowering ---
    "gpu-visible": Cause("BuildError", 2, "A process that cross-compiles must not see a GPU, but sees one.",
        "cross-compile in a separate process"),
    "operator-without-kernel": Cause("ModelError", 1,
        "There is no Triton kernel for an operation, or the shape of its result depends on data.",
        "replace the operation in the model, or build on a machine with this GPU, which can capture library kernels"),
    "lowering-broken": Cause("BuildError", 1, "Inductor failed for the program, or generated code that cgcompile does not know.",
        "this may be a defect of cgcompile: please report the model"),
    "measurements-broken": Cause("BuildError", 1,
        "The table of measured kernel configurations cannot be read. The message names the file.",
        "install cgcompile again"),
    # --- a model over several devices ---
    "world-refused": Cause("BuildError", 2, "A build over several GPUs does not support this model, target or option.",
        "`--world N` needs a model file with model(rank, world), one architecture, and no host regions"),
    "split-refused": Cause("BuildError", 1, "The model cannot be split by its layers.",
        "return the share of each GPU yourself: model(rank, world) with `--world N`, without --split"),
    "collective-refused": Cause("ModelError", 1, "The kernel of a collective does not support the dtype or the number of bytes.",
        "cast or pad before the collective: sums need bfloat16, float16 or float32, and each rank a multiple of 16 bytes"),
    "collectives-unlike": Cause("ModelError", 1, "The ranks of a model call different collectives, or call them in another order.",
        "the modules of model(rank, world) may differ in their weights, not in their collectives"),
    # --- offline: compiling ---
    "kernel-failed": Cause("BuildError", 1,
        "Triton or ptxas could not compile a kernel. The message has the first line of the compiler's error.",
        "please report the source of the kernel"),
    "kernel-too-large": Cause("BuildError", 1, "A kernel needs more shared or tensor memory than the target has for a block.",
        "use a configuration with smaller blocks or fewer stages"),
    "kernel-unsupported": Cause("BuildError", 1,
        "A kernel needs scratch memory or tensor descriptors, which a bundle does not support.",
        "use another configuration of this kernel"),
    "worker-died": Cause("BuildError", 1, "A process that compiles, interprets or times kernels ended without an answer.", DEFECT),
    # --- offline: the arena and the rows ---
    "lifetime-broken": Cause("BuildError", 1, "A buffer is used outside its lifetime, or allocated twice.", DEFECT),
    "arena-overlap": Cause("BuildError", 1,
        "The memory plan is wrong: two buffers that are in use at the same time overlap in the arena.", DEFECT),
    "place-invalid": Cause("BuildError", 1, "A buffer has no address in its memory, or its address is not aligned or out of range.",
        DEFECT),
    "parameter-mismatch": Cause("BuildError", 1,
        "The arguments of a kernel do not match its parameters in number, size, type or alignment.", DEFECT),
    "order-broken": Cause("BuildError", 1, "The rows of a recording are not in an order that its edges allow.", DEFECT),
    # --- offline: interpreting ---
    "function-not-interpretable": Cause("BuildError", 1,
        "A kernel uses a function that the interpreter does not support on the CPU.",
        "this machine cannot verify the bundle: build on a machine with the target GPU, or report the function"),
    "access-outside": Cause("BuildError", 1, "A kernel accesses memory outside the bundle's memories, or with wrong alignment.",
        DEFECT),
    "kernel-asserted": Cause("ModelError", 1,
        "An assertion in an interpreted kernel failed, or an assumption of the compiler was wrong.",
        "an index of the example inputs may be out of range: check inputs()"),
    "kernel-unreadable": Cause("BuildError", 1, "The source of a kernel is not valid Python, lacks the kernel, or raises an error.",
        DEFECT),
}  # fmt: skip


def named(code: str, message: str, hint: str) -> CgbundleError:
    """Returns the error for a code that another process sent."""
    kind: type[CgbundleError]
    if code in CATALOGUE:
        kind = ModelError if CATALOGUE[code].error == "ModelError" else BuildError
    else:
        kind = getattr(errors, catalogue.CATALOGUE[code].error)
    return kind(code, message, hint)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its causes, outermost first.  Yields no error twice, because causes can form a cycle.  Inductor's errors
    have their cause in `inner_exception`."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or getattr(cause, "inner_exception", None) or cause.__context__
