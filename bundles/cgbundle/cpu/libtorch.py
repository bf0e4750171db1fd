"""torch's shared libraries (libc10, libtorch_cpu) for host regions, loaded as files, without importing torch. The C interface is
torch/csrc/inductor/aoti_torch/c/shim.h. Tested with torch 2.13 (CPU build) and 2.11."""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from ctypes import POINTER, byref, c_int32, c_int64, c_void_p
from hashlib import sha256
from threading import RLock

from ..errors import MachineError
from ..process import FORKS
from ..validate.contents import SHARED_OBJECT, check_elf
from .machine import threads_of_quota

LIBRARIES = ("libc10.so", "libtorch_cpu.so")
VARIABLE = "CGBUNDLE_TORCH_LIB"  # folder of the libraries if no torch package is installed


def find(needed: str) -> tuple[str, str]:
    """(folder of the libraries, version or ""). `needed`: the bundle's version for messages. Raises library-missing."""

    def complete(folder: str) -> bool:
        return all(os.path.exists(os.path.join(folder, name)) for name in LIBRARIES)

    package = f"'torch>={needed}'" if needed else "torch"
    hint = f"pip install {package} (it is not imported), or set {VARIABLE} to the folder that holds {LIBRARIES[1]}"
    named = os.environ.get(VARIABLE)
    if named:
        if not complete(named):
            raise MachineError("library-missing", f"{VARIABLE}={named}: no {LIBRARIES[1]} there", hint)
        return named, _version(os.path.dirname(named))
    for entry in sys.path:
        package = os.path.join(entry or ".", "torch")
        if complete(os.path.join(package, "lib")):
            return os.path.join(package, "lib"), _version(package)
    text = f"{LIBRARIES[1]} not found: code for the CPU runs on torch's shared libraries, of the version that the bundle was built "
    raise MachineError("library-missing", f"{text}with or newer{f': {needed}' if needed else ''}", hint)


def _version(package: str) -> str:
    """`2.13.0` from torch/version.py, read as text."""
    with suppress(FileNotFoundError), open(os.path.join(package, "version.py")) as file:
        for line in file:
            if line.startswith("__version__"):
                return line.split("=")[1].strip().strip("'\"").split("+")[0]
    return ""


def numbers(version: str) -> tuple[int, ...]:
    return tuple([int(part) for part in version.split(".")[:2] if part.isdigit()])


def load(needed: str, threads: int | None = None) -> LibTorch:
    """`threads` for each run, None for OpenMP's default, or fewer under a quota. Raises library-missing, process-forked, or
    library-refused for a version older than `needed`."""
    FORKS.check_threads()
    folder, version = find(needed)
    if version and numbers(version) < numbers(needed):
        text = f"torch {version} in {folder} is older than the {needed} that the bundle was built with"
        raise MachineError("library-refused", text, f"pip install 'torch>={needed}'")
    try:
        handles = [_loaded(os.path.join(folder, name)) for name in LIBRARIES]
    except OSError as error:
        raise MachineError("library-refused", f"cannot load torch's libraries from {folder}: {error}") from None
    return LibTorch(handles[1], threads_of_quota() if threads is None else threads)


OPENMP = "libgomp.so.1"

SPIN_COUNT = "GOMP_SPINCOUNT"

SETTINGS = frozenset({SPIN_COUNT, "OMP_WAIT_POLICY"})  # a user's settings of how threads wait
SPINS = 1000
"""Polls of an OpenMP thread before it sleeps: some tens of microseconds. The default is milliseconds; on two busy cores threads
then poll for one that is not scheduled: MiniLM at 1x32 took 700 ms a call, now 14 (without libtorch, load 3 to 5;
cgcompile/targets/cpu/README.md)."""

BUILT_WITH = "cgbundle_built_with"
"""A function of code with its own C interface: the version of torch's headers."""


def of_code(data: bytes, where: str, threads: int | None = None) -> LibTorch | None:
    """The C interface in a shared object, or None. Raises image-invalid, library-refused, library-missing without OpenMP,
    process-forked."""
    if BUILT_WITH.encode() not in data:
        return None
    FORKS.check_threads()
    try:
        _loaded(OPENMP)
    except OSError:
        paths = [path for entry in sys.path if os.path.exists(path := os.path.join(entry or ".", "torch", "lib", OPENMP))]
        if not paths:
            raise MachineError("library-missing", f"{OPENMP} not found: OpenMP's library", "apt install libgomp1") from None
        _loaded(paths[0])
    library = load_shared_object(data, where, (BUILT_WITH,))
    return LibTorch(library, threads_of_quota() if threads is None else threads)


def built_with(library: ctypes.CDLL) -> str:
    """The version of torch that code with `BUILT_WITH` has, else ""."""
    version = getattr(library, BUILT_WITH, None)
    if version is None:
        return ""
    version.restype = ctypes.c_char_p
    return str(version().decode())


def _loaded(path: str) -> ctypes.CDLL:
    """Loads a library with global symbols; OpenMP reads its settings now."""
    if not SETTINGS.isdisjoint(os.environ):
        return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    os.environ[SPIN_COUNT] = str(SPINS)
    try:
        return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    finally:
        del os.environ[SPIN_COUNT]


class LibTorch:
    """Functions of the C interface. The caller owns handles until it gives them away or deletes them."""

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        self._library, self._threads = library, threads
        self.create = library.aoti_torch_create_tensor_from_blob
        self.create.argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p)
        self.delete, self.data_pointer = library.aoti_torch_delete_tensor_object, library.aoti_torch_get_data_ptr
        self.strides = library.aoti_torch_get_strides
        self.delete.argtypes = (c_void_p,)
        self.data_pointer.argtypes = self.strides.argtypes = (c_void_p, c_void_p)

    def threaded(self, run: Callable[..., int]) -> Callable[..., int]:
        if self._threads is None:
            return run
        from .machine import with_threads  # few programs are given a number

        return with_threads(run, self._library, self._threads)

    def dtype(self, name: str) -> int:
        try:
            return int(self._library[f"aoti_torch_dtype_{name}"]())
        except AttributeError:
            raise MachineError("library-refused", f"this torch has no dtype {name}") from None

    def last_exception(self) -> str:
        """The last exception of torch's libraries in this thread; "" before 2.13, and without libtorch."""
        what = getattr(self._library, "torch_exception_get_what_without_backtrace", None)
        if what is None:
            return ""
        what.restype = ctypes.c_char_p
        return (what() or b"").decode(errors="replace")

    def layout(self, handle: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """(torch's dtype number, shape, strides)."""
        rank, dtype = c_int64(), c_int32()
        self._library.aoti_torch_get_dim(c_void_p(handle), byref(rank))
        self._library.aoti_torch_get_dtype(c_void_p(handle), byref(dtype))
        columns = []
        for function in (self._library.aoti_torch_get_sizes, self.strides):
            numbers = POINTER(c_int64)()
            function(c_void_p(handle), byref(numbers))
            columns.append(tuple(numbers[: rank.value]))
        return dtype.value, columns[0], columns[1]


# --- shared objects by their contents -------------------------------------------------------------------------------
#
# The dynamic loader does not load a path or a file again that it has loaded before.  If a bundle was built again at its path, the
# code of the earlier one would run.  So the checked bytes are copied to sealed memory, which nobody can change or truncate, and are
# loaded from there.  Equal bytes are loaded once in a process.

_LOADED: dict[str, ctypes.CDLL] = {}  # loaded libraries by SHA-256, never unloaded: that is not safe for C++ code
_LOADING = RLock()  # reentrant: a signal handler may load a bundle during a load

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def load_shared_object(data: bytes, where: str, needed: tuple[str, ...]) -> ctypes.CDLL:
    """The shared object with contents `data`; `needed`: functions that it must have. Raises image-invalid for a truncated file,
    library-refused if the dynamic loader refuses it or a function is missing."""
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
    name = f"cgbundle-{os.path.basename(where)}-{digest[:16]}"
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise MachineError("library-refused", f"{where}: cannot create memory for the code: {error.strerror}") from None
    try:
        written = 0
        while written < len(data):
            written += os.write(descriptor, memoryview(data)[written:])
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        # a path that is unique for these contents, although descriptors are reused: `/` and `/.` spell the digest
        bits = f"{int(digest, 16):0256b}"
        return ctypes.CDLL("/proc/self/fd" + "".join("/." if bit == "1" else "/" for bit in bits) + f"/{descriptor}")
    except OSError as error:
        raise MachineError("library-refused", f"{where}: cannot be loaded: {str(error).rpartition(': ')[2]}") from None
    finally:
        os.close(descriptor)
