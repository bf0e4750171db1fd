"""Rules about where the user's code puts its tensors.  placing.py follows the moves and leaves markers in the program."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from cgbundle.format.schema import Finding

from ..model.device_tracking import TO_HOST
from ..model.user_code import place
from . import flow
from .subject import HOST, NOTE, REFUSE, Subject, computes, finding, operator


def device_copy(subject: Subject) -> Iterable[Finding]:
    """A copy from the GPU to the CPU that the user's code asks for: `.cpu()`, `.to("cpu")`, `device="cpu"`.

    What it looks for: the marker `cgcompile::to_host` that placing.py leaves for such a move, where something uses the copy.  The
    way back (`.cuda()`, `.to(x.device)`) is part of the same cut.

    Why CUDA forbids it: the copy can be recorded, but what comes next is Python's: the CPU waits for the copy, and waiting is
    forbidden while a stream is captured; a replay would run no CPU code between its kernels.

    Effect: a graph ends at the copy; it, and what the CPU computes from it, run between two graphs.

    Fix: leave the move out where the GPU can do what follows.

    Source: "DeviceCopy ops" in Scheduler.should_partition (torch/_inductor/scheduler.py); check_multiple_devices_or_any_cpu_nodes
    in torch/_inductor/cudagraph_utils.py disables CUDA graphs for the whole function.
    """
    for node, top in subject.calls():
        if subject.moved.get(node.name) == flow.DEVICE_COPY and top == node.name and not _made_there(subject, node):
            yield finding(
                "device-copy", HOST, "a tensor is copied to the CPU", node, subject.effect(top),
                "leave the move to the CPU out where the GPU can compute what follows",
            )  # fmt: skip


def cpu_operation(subject: Subject) -> Iterable[Finding]:
    """An operation that the user's code runs on the CPU.

    What it looks for: what takes tensors that are on the CPU (after `.cpu()`, or made with device="cpu"), and no tensor that is on
    the GPU; and what makes tensors there.  A weight goes with the other tensors: an embedding of indices on the CPU looks its table
    up there.

    Why CUDA forbids it: a CUDA graph holds work of one GPU.  (It can hold host functions, but those must not call CUDA and would
    have to be compiled into the serving process.)

    Effect: it is compiled for the CPU and runs between two graphs.

    Fix: move the tensor to the GPU before, or leave the move to the CPU out.

    Source: "cpu ops" in Scheduler.should_partition (torch/_inductor/scheduler.py); check_multiple_devices_or_any_cpu_nodes in
    torch/_inductor/cudagraph_utils.py.
    """
    for node, top in subject.calls():
        if top != node.name:
            continue
        if subject.moved.get(node.name) == flow.DEVICE_COPY and _made_there(subject, node):
            message = "a tensor is made on the CPU"
        elif subject.moved.get(node.name) == flow.CPU_OPERATION and computes(node) and _takes_moved(subject, node):
            message = f"{operator(node)} runs on the CPU"
        else:
            continue
        yield finding(
            "cpu-operation", HOST, message, node, subject.effect(top),
            "move its tensors to the GPU first, or leave the move to the CPU out",
        )  # fmt: skip


def _made_there(subject: Subject, node: Node) -> bool:
    """Whether a marker stands for `device="cpu"`, not for a copy: what it takes is nowhere else."""
    return subject.moved.get(node.all_input_nodes[0].name) == flow.CPU_OPERATION


def _takes_moved(subject: Subject, node: Node) -> bool:
    """Whether an operation takes what is on the CPU, and is told apart from what put it there: it stands at another line."""
    sources = [source for source in node.all_input_nodes if source.name in subject.moved]
    made = any(user.target is TO_HOST for user in node.users)
    return bool(sources) and not made and not any(place(node)[0] and place(node)[0] == place(source)[0] for source in sources)


def several_devices(subject: Subject) -> Iterable[Finding]:
    """Tensors of two devices in one operation, and devices other than one GPU and the CPU.

    What it looks for: placing.py sees an operation take a tensor of the CPU with dimensions together with tensors of the GPU, and
    moves to `cuda:1`, to an xpu and the like.

    Why CUDA forbids it: a kernel reads the memory of its GPU.  PyTorch itself refuses the mixture ("Expected all tensors to be on
    the same device"); a graph over several GPUs is not what a bundle holds.

    Effect: no bundle can be built.

    Fix: make tensors where the others are: `torch.arange(n, device=x.device)`, `y.to(x.device)`.  A device that was chosen when the
    module was made (`"cuda" if torch.cuda.is_available() else "cpu"`) is "cpu" on a machine without a GPU.

    Source: TensorIterator's check of devices in PyTorch; check_multiple_devices_or_any_cpu_nodes in
    torch/_inductor/cudagraph_utils.py ("multiple devices").
    """
    for obstacle in subject.obstacles("several-devices"):
        yield finding(
            "several-devices", REFUSE, obstacle.message, obstacle, "a bundle runs on one GPU, and PyTorch refuses the mixture",
            "make the tensor where the others are: device=x.device, or .to(x.device)",
        )  # fmt: skip


def pinned_memory(subject: Subject) -> Iterable[Finding]:
    """Pinned memory of the user's: `.pin_memory()`, `pin_memory=True`.

    What it looks for: placing.py sees the calls.

    Why CUDA cares: a copy between pageable memory and a GPU waits on the CPU, one from pinned memory does not; allocating pinned
    memory (cudaHostAlloc) is forbidden while a stream is captured, and a recorded copy reads the same address in every replay,
    whatever the user has put elsewhere since.

    Effect: none on results: the runtime copies between regions through memory of its own.

    Fix: leave it out.

    Source: the CUDA programming guide on stream capture and page-locked memory; the pinned memory notes in PyTorch's CUDA
    semantics.
    """
    for obstacle in subject.obstacles("pinned-memory"):
        yield finding(
            "pinned-memory", NOTE, obstacle.message, obstacle, "copies between regions go through the runtime's own memory",
            "leave pin_memory out",
        )  # fmt: skip
