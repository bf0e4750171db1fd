"""Shared objects loaded by what they hold, never by where they lie.

The dynamic loader takes a path, or a file, that it knows for the object that it has loaded from there.  A bundle that was built
again in its place would run the code of the one before.  So the bytes that were checked go into memory of their own, which no one
else can write to or cut, and are loaded from there; equal bytes once in a process.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from hashlib import sha256
from threading import RLock

from ..errors import MachineError
from ..validate.elf import SHARED_OBJECT, check_elf

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
            raise MachineError("library-refused", f"{where}: has no function {name}: not the code of a region")
    return library


def _load(data: bytes, digest: str, where: str) -> ctypes.CDLL:
    try:
        descriptor = os.memfd_create(f"cgbundle-{os.path.basename(where)}-{digest[:16]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise MachineError("library-refused", f"{where}: the system gives no memory to load code from: {error.strerror}") from None
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
