"""Explains an error of a compiler (Inductor, AOTAutograd, Triton, a C++ compiler): the operator of the model, its line, the cause.

The frames of the traceback show the failed node: it is the local variable `n` of `torch.fx.Interpreter.run_node` and of Inductor's
`GraphLowering.run_node` (torch 2.11, 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ..errors import causes
from ..model.user_code import first_line, place

CAUSES: tuple[tuple[str, str], ...] = (
    ("OutOfMemoryError", "the GPU's memory is full"),
    ("OutOfResources", "a kernel needs more registers or shared memory than the GPU has"),
    ("NoTritonConfigsError", "no configuration of a kernel fits the GPU"),
    ("NoValidChoicesError", "no kernel is known for it"),
    ("MissingOperatorWithoutDecomp", "Inductor has no kernel for it"),
    ("MissingOperatorWithDecomp", "Inductor has no kernel for it"),
    ("UnsupportedOperatorException", "it has no implementation without data (a meta or fake kernel)"),
    ("UnsupportedFakeTensorException", "it has no implementation without data (a meta or fake kernel)"),
    ("DynamicOutputShapeException", "the shape of its result depends on data"),
    ("DataDependentOutputException", "what the program does next depends on its data"),
    ("GuardOnDataDependentSymNode", "what the program does next depends on its data"),
    ("CUDACompileError", "the CUDA compiler refuses the code that Inductor wrote"),
    ("CppCompileError", "the C++ compiler refuses the code that Inductor wrote"),
    ("CompilationError", "Triton refuses the kernel that Inductor wrote"),
    ("InvalidCxxCompiler", "there is no C++ compiler that works"),
    ("RecursionError", "the program is nested too deeply for Inductor"),
)
"""Causes by the class name of an error of torch or Triton.  Several classes are private, or exist in some versions only."""

CODE = re.compile(
    r"[{};]|^\s*(def|class|import|from|return|#include|tl\.|auto|at::)\b|<[a-z_]+>::|/[\w.]+/[\w./]+\.(?:py|cpp|so)\b"
)
"""Matches generated code and paths of torch's files, which do not help the author of a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """`operator`: the operator that failed; `where`: its line, such as "model.py:12"; `cause`: the reason.  `fallback_op`: the
    operator of the exported program, as --fallback-op takes it.  All but `cause` are "" if unknown."""

    operator: str
    where: str
    cause: str
    fallback_op: str

    def hint(self, level: str) -> str:
        """Returns suggestions after the lowering `level` failed, or "" to use the hint of the error catalogue."""
        suggestions = [] if level == "eager" else ["cgcompile build ... --lower eager"]
        if self.fallback_op:
            suggestions.append(f"keep it on the host: cgcompile build ... --fallback-op {self.fallback_op}")
        return "; or ".join(suggestions)

    def __str__(self) -> str:
        subject = f"operator {self.operator}" if self.operator else "an operator"
        at = f" at {self.where}" if self.where else ""
        return f"{subject}{at} cannot be lowered: {self.cause}" if self.operator or at else f"cannot be lowered: {self.cause}"


def explain(error: BaseException, *modules: GraphModule) -> Failure:
    """Explains a compiler error.  `modules`: the compiled program, searched if the error names only an operator."""
    chain = list(causes(error))
    node = next((failing_node for exception in reversed(chain) if (failing_node := _failing_node(exception)) is not None), None)
    if node is None:
        node = next((named_node for exception in chain if (named_node := _named_node(str(exception), modules)) is not None), None)
    text = next((line for exception in chain if (line := _user_line(str(exception)))), "")
    fallback_op = source_operator(node, modules) if node is not None else ""
    shown = fallback_op or (_plain(str(node.target)) if node is not None else "")
    return Failure(operator=shown, where=place(node)[0] or text, cause=_cause(chain), fallback_op=fallback_op)


def source_operator(node: Node, modules: Iterable[GraphModule]) -> str:
    """Returns the operator of the exported program from which a node comes, as --fallback-op takes it ("aten.topk", "mylib.op").
    Returns "" if `modules`, the graphs of that program, do not call it.  In torch's `from_node` the oldest origin is innermost."""
    operators = {str(node.target) for module in modules for node in module.graph.nodes if node.op == "call_function"}
    names = [str(node.target)]
    sources = node.meta.get("from_node") or []
    while sources:
        names.append(str(sources[-1].target).removeprefix("torch.ops."))
        sources = getattr(sources[-1], "from_node", None) or []
    return next((_plain(name) for name in reversed(names) if name in operators), "")


def _plain(name: str) -> str:
    return name.removeprefix("torch.ops.").removesuffix(".default")


def _failing_node(error: BaseException) -> Node | None:
    """Returns the node of the innermost frame that runs a node."""
    node, trace = None, error.__traceback__
    while trace is not None:
        value = trace.tb_frame.f_locals.get("n") if trace.tb_frame.f_code.co_name == "run_node" else None
        if isinstance(value, Node) and value.op == "call_function":
            node = value
        trace = trace.tb_next
    return node


def _named_node(text: str, modules: Iterable[GraphModule]) -> Node | None:
    """Returns the first node of the operator that a message names ("target: aten.topk.default", "torch.ops.mylib.op.default")."""
    names = re.findall(r"target: ([\w.]+)|torch\.ops\.([\w.]+)|\b(aten[.:][\w.:]+)", text)
    for name in [next(filter(None, name)).replace("::", ".").rstrip(".") for name in names]:
        stem = name.removesuffix(".default")
        for module in modules:
            for node in module.graph.nodes:
                if node.op == "call_function" and (str(node.target) == name or str(node.target).startswith(stem + ".")):
                    return node
    return None


def _user_line(text: str) -> str:
    """Returns the line of the user's code that a message quotes, such as "model.py:12", or ""."""
    node = torch.fx.Graph().create_node("call_function", _user_line)
    node.meta["stack_trace"] = text
    return place(node)[0]


def _cause(chain: list[BaseException]) -> str:
    for name, words in CAUSES:
        if any(type(exception).__name__ == name or re.match(rf"\w*\.?{name}\b", str(exception)) for exception in chain):
            return words
    for exception in reversed(chain):
        line = first_line(exception)
        if line != "no message" and not CODE.search(line):
            return f"{type(exception).__name__}: {line}" if len(line) < 300 else f"{type(exception).__name__}: {line[:300]}..."
    return f"{type(chain[-1]).__name__}, without a message"
