"""Rules about the devices of the user's tensors.  model/devices/tracking.py adds a marker to the program for every move."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from cgbundle.format.schema import Finding

from ..model.devices.markers import TO_HOST
from ..model.user_code import place
from .context import HOST, NOTE, REFUSE, RuleContext, computes, finding, operator
from .host_placement import CPU_OPERATION, DEVICE_COPY, TENSOR_ASSERTIONS


def device_copy(context: RuleContext) -> Iterable[Finding]:
    """A copy from the GPU to the CPU in the user's code: `.cpu()`, `.to("cpu")`, `device="cpu"`.

    What it looks for: the marker `cgcompile::to_host` of such a move, if the copy is used.  The copy back belongs to the same
    finding.
    Why CUDA forbids it: the CPU waits for the copy, which a capture does not allow; a replay runs no CPU code between its kernels.
    Effect: the graph ends at the copy.  The copy, and the operations on the CPU after it, run between two graphs.
    Fix: remove the move, if the GPU can run the following operations.
    Source: "DeviceCopy ops" in Scheduler.should_partition (torch/_inductor/scheduler.py).
    """
    for node, top in context.calls():
        if context.moved.get(node.name) == DEVICE_COPY and top == node.name and not _created_on_cpu(context, node):
            yield finding(
                "device-copy", HOST, "a tensor is copied to the CPU" + (", which asserts its value" if _asserted(node) else ""),
                node, context.effect(top), "remove the move to the CPU, if the GPU can compute the next operations",
            )  # fmt: skip


def cpu_operation(context: RuleContext) -> Iterable[Finding]:
    """An operation that the user's code runs on the CPU.

    What it looks for: operations that create tensors on the CPU, or whose inputs are on the CPU only.  A weight counts as a
    tensor on the device of the other inputs.
    Why CUDA forbids it: a CUDA graph holds work of one GPU, and host functions without CUDA calls.
    Effect: it is compiled for the CPU and runs between two graphs.
    Fix: move the tensor to the GPU first, or remove the move to the CPU.
    Source: "cpu ops" in Scheduler.should_partition (torch/_inductor/scheduler.py).
    """
    for node, top in context.calls():
        if top != node.name:
            continue
        if context.moved.get(node.name) == DEVICE_COPY and _created_on_cpu(context, node):
            message = "a tensor is made on the CPU"
        elif context.moved.get(node.name) == CPU_OPERATION and computes(node) and _reads_host_tensor(context, node):
            message = f"{operator(node)} runs on the CPU"
        else:
            continue
        yield finding(
            "cpu-operation", HOST, message, node, context.effect(top),
            "move its tensors to the GPU first, or leave the move to the CPU out",
        )  # fmt: skip


def _asserted(node: Node) -> bool:
    """Returns whether a copy is used only by assertions."""
    return all(user.target in TENSOR_ASSERTIONS for user in node.users)


def _created_on_cpu(context: RuleContext, node: Node) -> bool:
    """Returns whether a marker comes from `device="cpu"`, not from a copy: its input is computed on the CPU."""
    return context.moved.get(node.all_input_nodes[0].name) == CPU_OPERATION


def _reads_host_tensor(context: RuleContext, node: Node) -> bool:
    """Returns whether an operation reads a tensor that another source line put on the CPU.  Returns False if the operation's result
    is copied to the CPU."""
    sources = [source for source in node.all_input_nodes if source.name in context.moved]
    host_copy = any(user.target is TO_HOST for user in node.users)
    return bool(sources) and not host_copy and not any(place(node)[0] and place(node)[0] == place(source)[0] for source in sources)


def moved_to_gpu(context: RuleContext) -> Iterable[Finding]:
    """A move to a GPU in a model that is built for the CPU: `x.cuda()`, `.to("cuda")`, `device="cuda"`.

    What it looks for: such moves while the model is traced.
    Why: all tensors of a CPU bundle are on the CPU.
    Effect: none on results: the move does nothing.  (Eager PyTorch fails without a GPU.)
    Fix: none needed; `device=x.device` uses the input's device.
    Source: `TensorPlaces.named` in model/devices/tensor_places.py.
    """
    for obstacle in context.obstacles("moved-to-gpu"):
        yield finding(
            "moved-to-gpu", NOTE, obstacle.message, obstacle, "the move does nothing: all tensors are on the CPU",
            "none needed; device=x.device follows the input",
        )  # fmt: skip


def wrapped_module(context: RuleContext) -> Iterable[Finding]:
    """A module inside torch.compile, nn.DataParallel or DistributedDataParallel.

    What it looks for: such modules: the model itself, or a module inside it.
    Why: a build compiles the model itself, for one device.
    Effect: none on results: the inner module is built, and weights have their names in the inner module.
    Fix: none needed.
    Source: model/tracing/wrapped_modules.py.
    """
    for note in context.exported.source.notes:
        yield finding(
            "wrapped-module", NOTE, note, None, "the inner module is built, and weights have the names that they have there",
            "none needed",
        )  # fmt: skip


def several_devices(context: RuleContext) -> Iterable[Finding]:
    """Tensors of two devices in one operation, or devices other than one GPU and the CPU.

    What it looks for: an operation on a tensor of the GPU and a tensor of the CPU that has dimensions; moves to `cuda:1`, to an
    xpu.
    Why CUDA forbids it: a kernel reads the memory of its GPU, and PyTorch itself refuses such operations.
    Effect: no bundle can be built.
    Fix: create tensors on the device of the other tensors: `torch.arange(n, device=x.device)`.  A device that the module's
    `__init__` chooses with `torch.cuda.is_available()` is "cpu" on a machine without a GPU.
    Source: TensorIterator's check of devices; check_multiple_devices_or_any_cpu_nodes in torch/_inductor/cudagraph_utils.py.
    """
    for obstacle in context.obstacles("several-devices"):
        yield finding(
            "several-devices", REFUSE, obstacle.message, obstacle, "PyTorch refuses tensors of two devices, and a bundle has one",
            "make the tensor where the others are: device=x.device, or .to(x.device)",
        )  # fmt: skip


def pinned_memory(context: RuleContext) -> Iterable[Finding]:
    """Pinned memory in the user's code: `.pin_memory()`, `pin_memory=True`.

    What it looks for: these calls during the export.
    Why CUDA cares: cudaHostAlloc is forbidden under capture, and a recorded copy reads the same address in every replay.
    Effect: none on results: the runtime uses its own memory for copies between regions.
    Fix: remove it.
    Source: the CUDA programming guide on stream capture and page-locked memory.
    """
    for obstacle in context.obstacles("pinned-memory"):
        yield finding(
            "pinned-memory", NOTE, obstacle.message, obstacle, "copies between regions go through the runtime's own memory",
            "leave pin_memory out",
        )  # fmt: skip
