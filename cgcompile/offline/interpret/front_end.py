"""Changes Triton's front end to run kernels as Python with `builder.Builder`.  Nothing is restored, so use a separate process.
Private interfaces, Triton 3.6 and 3.7: `triton.runtime.interpreter` (`_patch_lang`, `interpreter_builder`, `interpreter_semantic`,
`InterpreterOptions`, `InterpretedFunction.rewrite` and `.__call__`), `triton.language.core.tensor`, `triton.language.standard` by
name, and that `triton.jit` returns an `InterpretedFunction` if TRITON_INTERPRET=1 is set at import."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from ...errors import BuildError
from ..compile.kernel_source import define
from . import reductions
from .builder import Builder
from .memory import Memory
from .values import Array, Handle, working

PRECISIONS = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
"""The precisions that tl.dot accepts, as in triton.backends.nvidia."""

MAX_ITERATIONS = 1 << 16
"""The maximum number of iterations of a kernel's `while` loops.  A loop that waits for an instance of another batch never ends."""

_CONTROL_FLOW = "_control_flow"
"""The name of `ControlFlow` in rewritten functions."""


class Diverged(Exception):
    """Raised if a branch condition or loop bound differs between the instances of a batch.  `values`: one per instance."""

    def __init__(self, values: Array) -> None:
        super().__init__("instances of a batch do not agree")
        self.values = values


class ControlFlow:
    """Functions that rewritten kernels call where Python needs the truth value of a tensor.  They work as in
    triton.compiler.code_generator."""

    def __init__(self, builder: Builder, semantic: Any) -> None:
        self.builder = builder
        self.semantic = semantic

    def to_tensor(self, value: Any) -> Any:
        """Converts an assigned number to a tensor."""
        return self.semantic.to_tensor(value, False)

    def truth(self, value: Any) -> bool:
        """The truth value of a condition.  Raises Diverged."""
        return bool(self.number(value)) if isinstance(value, tl.tensor) else bool(value)

    def again(self, value: Any) -> bool:
        """The truth value of a `while` loop's condition.  Raises Diverged, and function-not-interpretable for an endless loop."""
        self.builder.iterations += 1
        if self.builder.iterations > MAX_ITERATIONS:
            raise self.builder.refusal(f"a loop of more than {MAX_ITERATIONS} turns: it may wait for another program instance")
        return self.truth(value)

    def number(self, value: Any) -> Any:
        """The value of a scalar tensor, equal in all instances.  Raises Diverged."""
        data = value.handle.data
        if data.size != len(data):
            raise self.builder.refusal("a branch or a bound that is a block")
        data = data.reshape(-1)
        if not (data == data[0]).all():
            raise Diverged(data)
        return data[0].item()

    def negation(self, value: Any) -> Any:
        return self.semantic.not_(value) if isinstance(value, tl.tensor) else not value

    def conjunction(self, *parts: Callable[[], Any]) -> Any:
        """`a and b`.  A false constant ends the evaluation, a tensor does not."""
        return self._fold(parts, False, self.semantic.logical_and)

    def disjunction(self, *parts: Callable[[], Any]) -> Any:
        """`a or b`.  A true constant ends the evaluation."""
        return self._fold(parts, True, self.semantic.logical_or)

    def _fold(self, parts: tuple[Callable[[], Any], ...], stop_value: bool, join: Callable[[Any, Any], Any]) -> Any:
        tensors: list[Any] = []
        value: Any = None
        for part in parts:
            value = part()
            if isinstance(value, tl.tensor):
                tensors.append(value)
            elif bool(value) is stop_value:
                return value
        return functools.reduce(join, tensors) if tensors else value


class _Rewriter(ast.NodeTransformer):
    """Replaces tests, `not`, `and`, `or` and assignments by calls of `ControlFlow`."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call("to_tensor", node.value)
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        node.test = _call("again", node.test)
        return node

    def _test(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.test = _call("truth", node.test)
        return node

    visit_If = visit_IfExp = visit_Assert = _test

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _call("negation", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        parts = [ast.Lambda(args=nothing, body=value) for value in node.values]
        return _call("conjunction" if isinstance(node.op, ast.And) else "disjunction", *parts)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    function = ast.Attribute(value=ast.Name(id=_CONTROL_FLOW, ctx=ast.Load()), attr=name, ctx=ast.Load())
    return ast.Call(func=function, args=list(arguments), keywords=[])


def rewritten(function: Callable[..., Any], control_flow: ControlFlow) -> Callable[..., Any]:
    """Rewrites a kernel's function to use `control_flow`.  Adds `control_flow`, min and max to the function's globals."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    code = compile(ast.fix_missing_locations(_Rewriter().visit(tree)), f"<{function.__qualname__} rewritten>", "exec")
    names = function.__globals__
    names[_CONTROL_FLOW] = control_flow
    names.setdefault("min", _min_or_max(builtins.min, "minimum"))
    names.setdefault("max", _min_or_max(builtins.max, "maximum"))
    local: dict[str, Any] = {}
    exec(code, names, local)
    result: Callable[..., Any] = local[function.__name__]
    return result


def _min_or_max(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Python's min or max (`plain`), which calls the function `name` of `tl` for tensors, as Triton's compiler does."""

    def smaller_or_larger(*items: Any) -> Any:
        if any(isinstance(item, tl.tensor) for item in items):
            return functools.reduce(getattr(tl, name), items)
        return plain(*items)

    return smaller_or_larger


def install(memory: Memory) -> tuple[Builder, ControlFlow]:
    """Makes Triton run kernels over `memory`.  Call it once per process."""
    assert isinstance(tl.zeros, interpreter.InterpretedFunction), "TRITON_INTERPRET=1 must be set before Triton is imported"
    options = dataclasses.replace(
        interpreter.InterpreterOptions(),
        sanitize_overflow=False,  # the compiler's default outside debug builds: integers wrap
        debug=True,  # also checks assertions that the GPU build omits
        allowed_dot_input_precisions=PRECISIONS,
    )
    builder = Builder(memory, options)
    semantic: Any = TritonSemantic(builder)
    control_flow = ControlFlow(builder, semantic)
    interpreter.interpreter_builder = builder
    interpreter.interpreter_semantic = semantic
    interpreter._patch_lang(_sees_all_of_triton)

    cache: dict[Any, Callable[..., Any]] = {}

    def rewrite(self: Any) -> Callable[..., Any]:
        if self.fn not in cache:
            cache[self.fn] = rewritten(self.fn, control_flow)
        return cache[self.fn]

    interpreter.InterpretedFunction.rewrite = rewrite
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)

    def over_tuples(work: Callable[..., Any], flag: str) -> Callable[..., Any]:
        """Makes `work`, which takes a tuple of tensors, also accept one tensor.  `flag`: the name of its last argument."""

        def call(input: Any, axis: Any, combine_fn: Any, last: Any = False, **named: Any) -> Any:
            items = input if isinstance(input, tuple) else (input,)
            result = work(builder, items, _plain(axis), combine_fn, bool(_plain(named.get(flag, last))))
            return result if isinstance(input, tuple) else result[0]

        return call

    for module in (tl, tl.core):
        module.reduce = over_tuples(reductions.reduce, "keep_dims")
        module.associative_scan = over_tuples(reductions.scan, "reverse")
        module.static_print = lambda *args, **kwargs: None
    tl.tensor.__bool__ = lambda self: True  # Triton's code tests `if mask` for a mask that may be None
    tl.tensor.__index__ = lambda self: int(control_flow.number(self))
    tl.tensor.T = property(
        lambda self: semantic.permute(self, (*range(len(self.shape) - 2), len(self.shape) - 1, len(self.shape) - 2))
    )
    return builder, control_flow


def function_of(source: str, name: str, control_flow: ControlFlow) -> Callable[..., Any]:
    """Returns the rewritten function of a variant's source.  Raises kernel-unreadable."""
    try:
        kernel = define(source, name, f"<kernel {name} {len(linecache.cache)}>")
    except (SyntaxError, NameError, AttributeError) as error:
        raise BuildError("kernel-unreadable", f"kernel {name}: its source cannot be run: {error}") from error
    if kernel is None:
        raise BuildError("kernel-unreadable", f"kernel {name}: its source does not define it")
    return rewritten(getattr(kernel, "fn", kernel), control_flow)


def argument(number: float, kind: str) -> Any:
    """A parameter, equal for all instances.  `number`: an address if `kind` is a pointer such as "*bf16"."""
    dtype = tl.str_to_ty(kind, None)
    return tl.tensor(Handle(np.array([number]).astype(working(dtype)), dtype), dtype)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _sees_all_of_triton() -> tuple[Any, Any]:
    """`_patch_lang` patches the Triton modules in a function's globals, here `tl` and `_core`."""
    return tl, _core


_core = tl.core
