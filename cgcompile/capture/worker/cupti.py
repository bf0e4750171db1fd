"""Records every kernel image that a process loads, and its CUmodule, by CUPTI callbacks.

Two kinds of callbacks work together (cupti_callbacks.h, CUDA 12 and 13).  The resource callback MODULE_LOADED receives the image
without a handle, *inside* the driver call that loads it.  The driver API callbacks keep a stack of calls per thread.  When such a
call returns, its arguments hold a handle of the new module, or of the kernel, function or library whose first use loaded it.
A load in a call that is not in `HOLDERS` is an error, because kernel names do not identify an image.

Subscribe before CUDA starts.  The callbacks only copy bytes and read integers; they never call CUDA.  They run Python, so use them
only in processes in which a single thread uses CUDA; `image_log.py` explains why.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import importlib.util
import os
import threading
from dataclasses import dataclass
from typing import Any

from ...errors import BuildError
from .driver import check, driver, succeeded

DRIVER_API, RESOURCE = 1, 3  # CUpti_CallbackDomain
MODULE_LOADED, GRAPHNODE_CREATED = 6, 13  # CUpti_CallbackIdResource
ENTER = 0  # CUpti_ApiCallbackSite

HOLDERS = {
    "cuModuleLoad": ("module", 0, True),
    "cuModuleLoadData": ("module", 0, True),
    "cuModuleLoadDataEx": ("module", 0, True),
    "cuModuleLoadFatBinary": ("module", 0, True),
    "cuLibraryLoadData": ("library", 0, True),
    "cuLibraryLoadFromFile": ("library", 0, True),
    "cuLibraryGetModule": ("library", 8, False),
    "cuLibraryGetGlobal": ("library", 16, False),
    "cuLibraryGetManaged": ("library", 16, False),
    "cuKernelGetFunction": ("kernel", 8, False),
    "cuKernelGetAttribute": ("kernel", 16, False),
    "cuKernelSetAttribute": ("kernel", 8, False),
    "cuKernelSetCacheConfig": ("kernel", 0, False),
    "cuKernelGetParamInfo": ("kernel", 0, False),
    "cuFuncGetModule": ("function", 8, False),
    "cuFuncGetAttribute": ("function", 16, False),
    "cuFuncSetAttribute": ("function", 0, False),
    "cuFuncSetCacheConfig": ("function", 0, False),
    "cuFuncGetParamInfo": ("function", 0, False),
    "cuFuncLoad": ("function", 0, False),
    "cuLaunchKernel": ("function", 0, False),
    "cuLaunchKernelEx": ("function", 8, False),
    "cuLaunchCooperativeKernel": ("function", 0, False),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": ("function", 8, False),
    "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": ("function", 8, False),
    "cuOccupancyAvailableDynamicSMemPerBlock": ("function", 8, False),
    "cuOccupancyMaxPotentialBlockSize": ("function", 16, False),
    "cuOccupancyMaxPotentialBlockSizeWithFlags": ("function", 16, False),
    "cuOccupancyMaxPotentialClusterSize": ("function", 8, False),
    "cuOccupancyMaxActiveClusters": ("function", 8, False),
}
"""Driver call -> (kind of handle, byte offset in its parameter struct, whether the field is a pointer to the handle).  The structs
are those of generated_cuda_meta.h, CUDA 13.0."""


class _CallbackData(ctypes.Structure):
    _fields_ = (
        ("site", ctypes.c_int),
        ("function", ctypes.c_char_p),
        ("params", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("context", ctypes.c_void_p),
    )


class _ResourceData(ctypes.Structure):
    _fields_ = (("context", ctypes.c_void_p), ("handle", ctypes.c_void_p), ("descriptor", ctypes.c_void_p))


class _ModuleData(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("bytes", ctypes.c_size_t), ("image", ctypes.c_void_p))


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A loaded image (SHA-256), its driver call, and the handle in the call's arguments.  `serial`: equal for images of one call.
    `kind`: kind of handle, "" if the call is unknown."""

    serial: int
    call: str
    kind: str
    handle: int
    image: str


class ImageLog:
    """The images loaded since the log was created.  CUPTI allows one log per process; `close()` ends its subscription."""

    def __init__(self) -> None:
        self._stacks = threading.local()
        self._loads: list[Load] = []
        self._images: dict[str, bytes] = {}
        self._subscribe(CALLBACK(self._on_event), None, MODULE_LOADED)

    def _subscribe(self, callback: Any, user: int | None, *events: int) -> None:
        """Lets CUPTI call `callback` with `user` around every driver call, and for these events of resources."""
        self._cupti = ctypes.CDLL(_find_cupti())
        self._callback = callback  # keep a reference: CUPTI calls it until `close`
        self._subscriber = ctypes.c_void_p()
        self._call("cuptiSubscribe", ctypes.byref(self._subscriber), callback, ctypes.c_void_p(user))
        self._call("cuptiEnableDomain", 1, self._subscriber, DRIVER_API)
        for event in events:
            self._call("cuptiEnableCallback", 1, self._subscriber, RESOURCE, event)

    def close(self) -> None:
        """Ends the CUPTI subscription.  The log stays readable."""
        self._call("cuptiUnsubscribe", self._subscriber)

    @property
    def images(self) -> dict[str, bytes]:
        """SHA-256 -> bytes of every loaded image."""
        return dict(self._images)

    def modules(self) -> dict[int, tuple[str, ...]]:
        """Returns CUmodule handle -> SHA-256 of its image, or of all images that one call loaded.  A reused handle maps to its
        latest image.  Call it with the context current, before kernels may be unloaded.  Raises loader-unknown."""
        unknown = sorted({load.call for load in self._loads if not load.kind})
        if unknown:
            raise BuildError(
                "loader-unknown", f"images were loaded inside {', '.join(unknown)}: the recorder does not know that call's module"
            )
        images: dict[int, tuple[str, ...]] = {}
        previous = -1
        for load in list(self._loads):
            module = _module_of(load)
            if module is None:  # a kernel or library that was unloaded: no node of a live graph can use it
                continue
            same_call = load.serial == previous
            images[module] = (*images[module], load.image) if same_call else (load.image,)
            previous = load.serial
        return images

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cupti, name)(*arguments)
        if code:
            raise BuildError("cupti-unavailable", f"{name} failed with CUPTI error {code}")

    def _stack(self) -> list[tuple[str, list[str]]]:
        if not hasattr(self._stacks, "calls"):
            self._stacks.calls = []
        calls: list[tuple[str, list[str]]] = self._stacks.calls
        return calls

    def _on_event(self, _user: int, domain: int, number: int, data: int) -> None:
        stack = self._stack()
        if domain == DRIVER_API:
            call = ctypes.cast(data, ctypes.POINTER(_CallbackData)).contents
            if call.site == ENTER:
                stack.append((call.function.decode(), []))
            elif stack:
                name, images = stack.pop()
                if images and not (call.result and ctypes.c_int.from_address(call.result).value):
                    kind, handle = _handle(name, call.params)
                    serial = len(self._loads)
                    self._loads.extend(Load(serial=serial, call=name, kind=kind, handle=handle, image=image) for image in images)
        elif domain == RESOURCE:
            resource = ctypes.cast(data, ctypes.POINTER(_ResourceData)).contents
            module = ctypes.cast(resource.descriptor, ctypes.POINTER(_ModuleData)).contents
            image = ctypes.string_at(module.image, module.bytes)
            digest = hashlib.sha256(image).hexdigest()
            self._images.setdefault(digest, image)
            if stack:
                stack[-1][1].append(digest)
            else:
                self._loads.append(Load(serial=len(self._loads), call="no driver call", kind="", handle=0, image=digest))


def _handle(name: str, params: int) -> tuple[str, int]:
    """Returns (kind, handle) from a driver call's parameters, or ("", 0) for a call that is not in `HOLDERS`."""
    base = name.removesuffix("_ptsz").removesuffix("_v2")
    if base not in HOLDERS:
        return "", 0
    kind, at, indirect = HOLDERS[base]
    value = ctypes.c_void_p.from_address(params + at).value
    if indirect and value:
        value = ctypes.c_void_p.from_address(value).value
    return kind, value or 0


def _module_of(load: Load) -> int | None:
    """Returns the CUmodule of a handle, or None if the handle is no longer valid.  cudart passes CUkernel handles as CUfunction
    (cuda.h allows the cast), so a function handle is tried as both."""
    if load.kind == "module":
        return load.handle
    if load.kind == "library":
        result = driver.cuLibraryGetModule(driver.CUlibrary(load.handle))
        return int(result[1]) if succeeded(result) else None
    if load.kind == "function":
        result = driver.cuFuncGetModule(driver.CUfunction(load.handle))
        if succeeded(result):
            return int(result[1])
    result = driver.cuKernelGetFunction(driver.CUkernel(load.handle))
    return int(check(driver.cuFuncGetModule(result[1]))) if succeeded(result) else None


def _find_cupti() -> str:
    """Returns the path of libcupti from torch's `nvidia` packages, else from the CUDA toolkit.  Raises cupti-unavailable."""
    roots = [os.path.join(path, "**") for path in _package_paths("nvidia")]
    roots += [
        os.path.join(root, "extras", "CUPTI", "lib64") for root in filter(None, [os.environ.get("CUDA_HOME"), "/usr/local/cuda"])
    ]
    for root in roots:
        libraries = sorted(glob.glob(os.path.join(root, "libcupti.so*"), recursive=True))
        if libraries:
            return libraries[-1]
    raise BuildError("cupti-unavailable", "libcupti.so was found neither beside torch nor in the CUDA toolkit")


def _package_paths(name: str) -> list[str]:
    spec = importlib.util.find_spec(name)
    return list(spec.submodule_search_locations or []) if spec else []
