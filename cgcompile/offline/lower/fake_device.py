"""A fake device: torch and Triton generate code for a GPU that is not present.

`_replacements` lists the replaced names of torch and Triton with the reasons.  They are restored at the end.  A GPU that is present
is hidden from the process, so torch must not have initialized CUDA or counted GPUs before.  Private interfaces, tested with torch
2.11 (triton 3.6) and 2.13 (triton 3.7): the names in `_replacements`, `_cached`, `_interfaces` and `_device_guard`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ...errors import BuildError
from ...targets.architectures import Arch

TESTED = "torch 2.11 and 2.13, triton 3.6 and 3.7"
CUDA = "13.0"
"""The CUDA version that torch reports."""

VTABLE_ENTRIES = 64
"""The size of the fake table of C++ methods.  A device guard has fewer."""

CUDA_TYPE = 1
"""c10::DeviceType::CUDA."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """A name of torch or Triton and its replacement.  `may_be_absent`: builds of torch without CUDA lack the name."""

    owner: str
    name: str
    value: Any
    why: str
    may_be_absent: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSource:
    """A Triton kernel that is neither loaded nor compiled.  `text`: the Python module that Inductor wrote.  `name`: its function in
    the module."""

    name: str
    text: str


@contextlib.contextmanager
def fake_device(arch: Arch) -> Iterator[None]:
    """Inside, torch has one GPU "cuda:0" of architecture `arch`, only for fake tensors, and kernels become `KernelSource`s.  Raises
    gpu-visible if the process sees a GPU, and torch-unsupported if a name that has to be replaced is missing."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}))
        if torch.cuda.is_initialized() or torch.cuda.device_count():
            text = "torch already sees a GPU in this process, so the GPU cannot be hidden any more"
            raise BuildError("gpu-visible", text)
        caches = [_find(owner, name) for owner, name in _cached()]
        for cached in caches:
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        for row in _replacements(arch):
            owner = _find(row.owner)
            if not (row.may_be_absent or hasattr(owner, row.name)):
                raise _lacks(f"{row.owner}.{row.name}", row.why)
            stack.enter_context(mock.patch.object(owner, row.name, row.value, create=row.may_be_absent))
        stack.enter_context(_interfaces())
        stack.enter_context(_device_guard())
        yield


# --- replacements ---------------------------------------------------------------------------------------------


def _replacements(arch: Arch) -> list[Replacement]:
    properties = device_properties(arch)
    state = torch.zeros(16, dtype=torch.uint8)
    cuda, fake = "torch.cuda", "torch._subclasses.fake_tensor"
    rows = [
        # queries of Inductor about the GPU
        (cuda, "is_available", lambda: True, "Inductor lowers for cuda"),
        (cuda, "device_count", lambda: 1, "there is one GPU"),
        (cuda, "current_device", lambda: 0, "the only GPU is the current one"),
        (cuda, "get_device_properties", lambda device=None: properties, "heuristics read multiprocessors and memory"),
        (
            cuda,
            "get_device_capability",
            lambda device=None: (arch.major, arch.minor),
            "Inductor and Triton use the features of this capability",
        ),
        (cuda, "get_device_name", lambda device=None: arch.gpu, "cache keys and reports contain the name"),
        (cuda, "is_bf16_supported", lambda including_emulation=True: True, "every target has bfloat16"),
        (cuda, "is_tf32_supported", lambda: True, "every target has tf32"),
        # calls that would initialize a GPU
        (cuda, "_lazy_init", lambda: None, "no CUDA context may be created"),
        (cuda, "is_initialized", lambda: False, "no CUDA context exists"),
        (cuda, "synchronize", lambda device=None: None, "nothing runs that could be waited for"),
        (cuda, "set_device", lambda device: None, "generated code selects the device"),
        (cuda, "device", lambda device: contextlib.nullcontext(), "lowering runs with the device selected"),
        (cuda, "_DeviceGuard", lambda index: contextlib.nullcontext(), "generated code runs with the device selected"),
        (cuda, "get_rng_state", lambda device="cuda": state, "Inductor saves the random state of every device"),
        (cuda, "set_rng_state", lambda new_state, device="cuda": None, "Inductor restores the random state of every device"),
        (cuda + ".random", "get_rng_state", lambda device="cuda": state, "torch.cuda.get_rng_state by its second name"),
        (cuda + ".random", "set_rng_state", lambda new_state, device="cuda": None, "torch.cuda.set_rng_state by its second name"),
        (fake, "init_gpu_context", lambda device: None, "fake tensors would allocate a real tensor on the GPU"),
        (fake + ".FakeTensorMode", "avoid_device_init", True, "a tensor literal would initialize the GPU"),
        ("torch.version", "cuda", CUDA, "the generated code must not depend on the build of torch"),
        # calls that would compile, load or measure kernels
        ("torch._inductor.async_compile.AsyncCompile", "triton", _keep_source, "kernels are compiled later, all at once"),
        (
            "torch._inductor.select_algorithm.AlgorithmSelectorCache",
            "make_precompile_fn",
            _refuse("compile candidates of a template to measure them"),
            "each template has one candidate, so none is measured",
        ),
        (
            "torch._inductor.runtime.triton_helpers",
            "set_driver_to_gpu",
            lambda: None,
            "the module of a kernel would load the CUDA driver",
        ),
        ("triton.runtime.driver.driver", "_active", _Driver(arch), "Triton would load the CUDA driver"),
    ]
    fakes = [Replacement(owner=owner, name=name, value=value, why=why) for owner, name, value, why in rows]
    stream = "_cuda_getCurrentRawStream"
    return [
        *fakes,
        Replacement(owner="torch._C", name=stream, value=lambda index: 0, why="generated code imports it", may_be_absent=True),
    ]


def _cached() -> list[tuple[str, str]]:
    """Functions that cache properties of a device.  `fake_device` clears their caches when it starts and when it ends."""
    utils = "torch._inductor.utils"
    return [
        ("torch._inductor.runtime.hints.DeviceProperties", "create"),
        (utils, "get_gpu_type"),
        (utils, "is_big_gpu"),
        (utils, "get_max_num_sms"),
        (utils, "get_backend_num_stages"),
        (utils, "get_device_tflops"),
        (utils, "get_gpu_dram_gbps"),
        (utils, "use_decompose_k_choice"),
        (utils, "get_k_splits"),
        ("torch.utils._triton", "has_triton_tma_device"),
        ("torch.utils._triton", "has_triton"),
        ("torch.utils._triton", "triton_hash_with_backend"),
    ]


def device_properties(arch: Arch) -> SimpleNamespace:
    """The properties of `arch` under the names of `torch.cuda.get_device_properties`."""
    return SimpleNamespace(
        name=arch.gpu,
        major=arch.major,
        minor=arch.minor,
        multi_processor_count=arch.multiprocessors,
        total_memory=arch.memory,
        warp_size=arch.warp,
        regs_per_multiprocessor=arch.registers,
        max_threads_per_multi_processor=arch.threads_sm,
        max_threads_per_block=arch.threads_block,
        shared_memory_per_block=arch.shared_block,
        shared_memory_per_block_optin=arch.shared_optin,
        shared_memory_per_multiprocessor=arch.shared_sm,
        L2_cache_size=arch.l2,
        gcnArchName="",
    )


@contextlib.contextmanager
def _interfaces() -> Iterator[None]:
    """Registers "cuda" in Inductor's table of devices, with the replacements above.  torch's entries in this table refer to the
    original functions."""
    module = _find("torch._dynamo.device_interface")
    for name in ("CudaInterface", "device_interfaces", "init_device_reg", "register_interface_for_device"):
        if not hasattr(module, name):
            raise _lacks(f"torch._dynamo.device_interface.{name}", "Inductor's table of devices")
    module.init_device_reg()
    with mock.patch.dict(module.device_interfaces):
        interface = _interface(module.CudaInterface)
        module.register_interface_for_device("cuda", interface)
        module.register_interface_for_device("cuda:0", interface)
        yield


def _interface(base: type) -> type:
    def static_methods(*names: str) -> dict[str, Any]:
        return {name: staticmethod(getattr(torch.cuda, name)) for name in names}

    worker = type("Worker", (), static_methods("set_device", "current_device", "get_device_properties"))
    members: dict[str, Any] = {
        **static_methods("is_available", "device_count", "current_device", "set_device", "synchronize", "get_device_properties"),
        "is_bf16_supported": staticmethod(lambda including_emulation=False: True),
        "get_raw_stream": staticmethod(lambda index: 0),
        "exchange_device": staticmethod(lambda device: 0),
        "maybe_exchange_device": staticmethod(lambda device: 0),
        "is_triton_capable": staticmethod(lambda device=None: True),
        "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
    }
    return type("FakeDeviceInterface", (base,), {"Worker": worker, **members})


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """Installs a no-op device guard for cuda, which operations on fake cuda tensors need.  A torch build with CUDA installs one
    itself if there is no GPU (`FakeTensorMode` requests it).  For a build without CUDA, registers a guard that reports no devices;
    torch then replaces it with its own no-op guard."""
    if torch.backends.cuda.is_built():
        yield
        return
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        register = library._ZN3c104impl24DeviceGuardImplRegistrarC1ENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE
        replace = library._ZN3c104impl24ensureCUDADeviceGuardSetEv
    except (OSError, AttributeError) as error:
        raise _lacks("c10::impl::DeviceGuardImplRegistrar in libc10.so", "this build has no guard for cuda") from error
    register.argtypes = [ctypes.c_void_p, ctypes.c_byte, ctypes.c_void_p]
    register.restype = replace.restype = None
    returns_zero = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    table = (ctypes.c_void_p * VTABLE_ENTRIES)(*[ctypes.cast(returns_zero, ctypes.c_void_p).value] * VTABLE_ENTRIES)
    guard = ctypes.c_void_p(ctypes.addressof(table))  # a C++ object begins with a pointer to its methods
    registrar = ctypes.create_string_buffer(64)
    register(registrar, CUDA_TYPE, ctypes.addressof(guard))
    replace()  # the guard reports 0 devices, so torch installs its own
    try:
        yield
    finally:
        register(registrar, CUDA_TYPE, None)


class _Driver:
    """Replaces Triton's CUDA driver.  Reports only the target of the compilation and the device."""

    def __init__(self, arch: Arch) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch.capability, self._arch.warp)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _keep_source(compiler: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> KernelSource:
    return KernelSource(name=kernel_name, text=source_code)


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise BuildError(
            "torch-unsupported", f"torch {torch.__version__} wanted to {what}, which needs a GPU; tested with {TESTED}"
        )

    return refuse


# --- names ----------------------------------------------------------------------------------------------------


def _find(path: str, name: str = "") -> Any:
    """The object at a dotted path.  Raises torch-unsupported."""
    parts = [*path.split("."), *([name] if name else [])]
    for cut in range(len(parts), 0, -1):
        module = ".".join(parts[:cut])
        if module not in sys.modules:
            try:
                importlib.import_module(module)
            except ModuleNotFoundError:
                continue
        target: Any = sys.modules[module]
        for part in parts[cut:]:
            if not hasattr(target, part):
                raise _lacks(".".join(parts), "it has to be replaced")
            target = getattr(target, part)
        return target
    raise _lacks(".".join(parts), "it has to be replaced")


def _lacks(name: str, why: str) -> BuildError:
    return BuildError("torch-unsupported", f"torch {torch.__version__} has no {name} ({why}); tested with {TESTED}")
