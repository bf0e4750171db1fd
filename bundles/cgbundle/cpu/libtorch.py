"""torch's shared libraries, loaded as files: torch itself is never imported.

Host regions are shared objects made by AOTInductor; they need libc10 and libtorch_cpu, and are driven through the C interface
declared in torch/csrc/inductor/aoti_torch/c/shim.h.  Tested with torch 2.13 (CPU build) and 2.11.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from collections.abc import Callable
from ctypes import POINTER, byref, c_int32, c_int64, c_void_p
from hashlib import sha256
from threading import RLock

from ..call.forks import FORKS
from ..errors import MachineError
from ..validate.elf import SHARED_OBJECT, check_elf
from .machine import threads_of_quota

LIBRARIES = ("libc10.so", "libtorch_cpu.so")
VARIABLE = "CGBUNDLE_TORCH_LIB"
"""Names the folder of the libraries where no torch package is installed."""


def find(needed: str) -> tuple[str, str]:
    """(folder of the libraries, version or "" when unknown).  Raises library-missing; `needed` is the version for the message, ""
    where no bundle names one."""
    package = f"'torch>={needed}'" if needed else "torch"
    hint = f"pip install {package} (it is not imported), or set {VARIABLE} to the folder that holds {LIBRARIES[1]}"
    named = os.environ.get(VARIABLE)
    if named:
        if not _complete(named):
            raise MachineError("library-missing", f"{VARIABLE}={named}: no {LIBRARIES[1]} there", hint)
        return named, _version(os.path.dirname(named))
    for entry in sys.path:
        package = os.path.join(entry or ".", "torch")
        if _complete(os.path.join(package, "lib")):
            return os.path.join(package, "lib"), _version(package)
    raise MachineError(
        "library-missing",
        f"{LIBRARIES[1]} not found: code for the CPU runs on torch's shared libraries, of the version that the bundle was built "
        "with or newer" + (f": {needed}" if needed else ""),
        hint,
    )


def _complete(folder: str) -> bool:
    return all(os.path.exists(os.path.join(folder, name)) for name in LIBRARIES)


def _version(package: str) -> str:
    """`2.13.0` from torch/version.py, which is text: importing it would import torch."""
    try:
        with open(os.path.join(package, "version.py")) as file:
            for line in file:
                if line.startswith("__version__"):
                    return line.split("=")[1].strip().strip("'\"").split("+")[0]
    except FileNotFoundError:
        pass
    return ""


def numbers(version: str) -> tuple[int, ...]:
    """(2, 13) from "2.13.0": what versions are compared by."""
    return tuple([int(part) for part in version.split(".")[:2] if part.isdigit()])


def load(needed: str, threads: int | None = None) -> LibTorch:
    """`threads`: how many each run uses, None for OpenMP's own number, or fewer where the process has a quota.

    Raises library-missing, process-forked where the parent has run such code, or library-refused for a version older than
    `needed`, whose C interface code was built for."""
    FORKS.check_threads()
    folder, version = find(needed)
    if version and numbers(version) < numbers(needed):
        raise MachineError(
            "library-refused",
            f"torch {version} in {folder} is older than the {needed} that the bundle was built with",
            f"pip install 'torch>={needed}'",
        )
    try:
        handles = [_loaded(os.path.join(folder, name)) for name in LIBRARIES]
    except OSError as error:
        raise MachineError("library-refused", f"cannot load torch's libraries from {folder}: {error}") from None
    return LibTorch(handles[1], threads_of_quota() if threads is None else threads)


OPENMP = "libgomp.so.1"

SPIN_COUNT = "GOMP_SPINCOUNT"

SETTINGS = frozenset({SPIN_COUNT, "OMP_WAIT_POLICY"})
"""Variables by which a user says how threads wait."""

SPINS = 1000
"""How often a thread of OpenMP's asks again, before it sleeps until it is woken: some tens of microseconds.  By default it asks for
milliseconds, and on two cores that others keep busy waits for one that is not scheduled: MiniLM at 1x32 took 700 ms a call, and
takes 14 so (with functions of its own, load 3 to 5; cgcompile/targets/cpu/README.md)."""

BUILT_WITH = "cgbundle_built_with"
"""The function of code that brings its own C interface: the version of torch whose headers it was compiled with."""


def of_code(data: bytes, where: str, threads: int | None = None) -> LibTorch | None:
    """The C interface that a shared object brings with it, None where it brings none.  `where`: its name for messages; `threads` as
    for `load`.  Raises image-invalid, library-refused, library-missing without OpenMP's library, and process-forked."""
    if BUILT_WITH.encode() not in data:
        return None
    FORKS.check_threads()
    _load_openmp()
    library = load_shared_object(data, where, (BUILT_WITH,))
    return LibTorch(library, threads_of_quota() if threads is None else threads)


def built_with(library: ctypes.CDLL) -> str:
    """The version of torch that such code was built with, "" of other code."""
    version = getattr(library, BUILT_WITH, None)
    if version is None:
        return ""
    version.restype = ctypes.c_char_p
    return str(version().decode())


def _loaded(path: str) -> ctypes.CDLL:
    """A library whose functions those that are loaded later find, with OpenMP's under it, which reads its settings now."""
    if not SETTINGS.isdisjoint(os.environ):
        return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    os.environ[SPIN_COUNT] = str(SPINS)
    try:
        return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    finally:
        del os.environ[SPIN_COUNT]


def _load_openmp() -> None:
    """The system's library, else the one that torch brings."""
    try:
        _loaded(OPENMP)
    except OSError:
        paths = [path for entry in sys.path if os.path.exists(path := os.path.join(entry or ".", "torch", "lib", OPENMP))]
        if not paths:
            raise MachineError("library-missing", f"{OPENMP} not found: OpenMP's library", "apt install libgomp1") from None
        _loaded(paths[0])


class LibTorch:
    """The functions of the C interface that are needed.  Handles are tensors of the caller's until given away or deleted."""

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        self._library, self._threads = library, threads
        self.create = library.aoti_torch_create_tensor_from_blob
        self.create.argtypes = (
            c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p,
        )  # fmt: skip
        self.delete = library.aoti_torch_delete_tensor_object
        self.delete.argtypes = (c_void_p,)
        self.data_pointer = library.aoti_torch_get_data_ptr
        self.data_pointer.argtypes = (c_void_p, c_void_p)
        self.strides = library.aoti_torch_get_strides
        self.strides.argtypes = (c_void_p, c_void_p)

    def threaded(self, run: Callable[..., int]) -> Callable[..., int]:
        """A function of a shared object, run with the number of threads that was asked for.  Raises library-refused."""
        if self._threads is None:
            return run
        from .machine import with_threads  # few programs are given a number

        return with_threads(run, self._library, self._threads)

    def dtype(self, name: str) -> int:
        """torch's number for a dtype.  Raises library-refused where this torch has none."""
        try:
            return int(self._library[f"aoti_torch_dtype_{name}"]())
        except AttributeError:
            raise MachineError("library-refused", f"this torch has no dtype {name}") from None

    def last_exception(self) -> str:
        """What torch's libraries threw last in this thread, "" where they do not say (before 2.13; code with its own)."""
        what = getattr(self._library, "torch_exception_get_what_without_backtrace", None)
        if what is None:
            return ""
        what.restype = ctypes.c_char_p
        return (what() or b"").decode(errors="replace")

    def layout(self, handle: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """(torch's dtype number, shape, strides) of a tensor."""
        rank, dtype = c_int64(), c_int32()
        self._library.aoti_torch_get_dim(c_void_p(handle), byref(rank))
        self._library.aoti_torch_get_dtype(c_void_p(handle), byref(dtype))
        columns = []
        for function in (self._library.aoti_torch_get_sizes, self.strides):
            numbers = POINTER(c_int64)()
            function(c_void_p(handle), byref(numbers))
            columns.append(tuple(numbers[: rank.value]))
        return dtype.value, columns[0], columns[1]


# --- shared objects by what they hold -------------------------------------------------------------------------------
#
# The dynamic loader takes a path, or a file, that it knows for the object that it has loaded from there.  A bundle that was built
# again in its place would run the code of the one before.  So the bytes that were checked go into memory of their own, which no one
# else can write to or cut, and are loaded from there; equal bytes once in a process.

_LOADED: dict[str, ctypes.CDLL] = {}
"""What this process has loaded, by SHA-256.  It stays: to unload C++ code is not safe."""

_LOADING = RLock()  # the handler of a signal may load a bundle in the middle of a load

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def load_shared_object(data: bytes, where: str, needed: tuple[str, ...]) -> ctypes.CDLL:
    """The shared object whose file holds `data`; `where` is its name for messages, `needed` the functions that it must have.

    Raises image-invalid for a file that is cut off, library-refused when the dynamic loader refuses it or a function is missing.
    """
    digest = sha256(data).hexdigest()
    with _LOADING:
        library = _LOADED.get(digest)
        if library is None:
            check_elf(data, where, SHARED_OBJECT)
            library = _LOADED[digest] = _load(data, digest, where)
    for name in needed:
        if not hasattr(library, name):
            raise MachineError("library-refused", f"{where}: has no function {name}: it is not the code of a region")
    return library


def _load(data: bytes, digest: str, where: str) -> ctypes.CDLL:
    try:
        descriptor = os.memfd_create(f"cgbundle-{os.path.basename(where)}-{digest[:16]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise MachineError("library-refused", f"{where}: cannot create memory for the code: {error.strerror}") from None
    try:
        written = 0
        while written < len(data):
            written += os.write(descriptor, memoryview(data)[written:])
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return ctypes.CDLL(_unique_path(descriptor, digest))
    except OSError as error:
        raise MachineError("library-refused", f"{where}: cannot be loaded: {str(error).rpartition(': ')[2]}") from None
    finally:
        os.close(descriptor)


def _unique_path(descriptor: int, digest: str) -> str:
    """A path of the descriptor that no other contents ever have in this process, though descriptors are numbered anew: the digest
    is spelled in it, a bit as `/` or `/.`, which mean nothing to the system."""
    return "/proc/self/fd" + "".join("/." if bit == "1" else "/" for bit in f"{int(digest, 16):0256b}") + f"/{descriptor}"
