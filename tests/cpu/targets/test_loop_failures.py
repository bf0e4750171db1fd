"""An index out of range in a parallel loop raises an error instead of ending the process.

cli/docs/calls.md shows the error of a compiled bundle, and tests/cpu/docs runs it. These tests read the generated code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

NO_HEADERS = {"aot_inductor.precompile_headers": False}
"""Otherwise Inductor compiles headers for ten seconds, though none of its code is compiled here."""


class Looking(torch.nn.Module):
    """An embedding, whose indices are checked, and a loop without checks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(1000, 64)

    def forward(self, ids: Any, x: Any) -> tuple[Any, Any]:
        """Returns the exponentials of the rows `ids`, and the sine of `x`."""
        return self.table(ids).exp(), x.sin()


def kernels(folder: Path) -> list[str]:
    """Returns the C++ of every loop nest of `Looking`, without compiling it."""
    from cgcompile.targets.cpu.loops import exceptions_after_loops

    program = torch.export.export(Looking(), (torch.zeros(64, 128, dtype=torch.int64), torch.zeros(1 << 18)))
    options = {"aot_inductor.package": True, "aot_inductor.package_cpp_only": True, "cpp.vec_isa_ok": True, **NO_HEADERS}
    with pytest.MonkeyPatch.context() as patch, exceptions_after_loops():
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        files = torch._inductor.aot_compile(program.module(), program.example_inputs[0], options=options)
    assert isinstance(files, list)
    code = "\n".join(Path(file).read_text() for file in files if str(file).endswith(".cpp"))
    return re.findall(r'extern "C"[^\n]* void [^\n]*cpp_fused.*?\n}', code, re.DOTALL)


def test_checks_throw_behind_the_loops(tmp_path: Path) -> None:
    kernel_codes = kernels(tmp_path)
    checked = [code for code in kernel_codes if "index out of bounds" in code]
    assert checked and len(checked) < len(kernel_codes)
    for code in kernel_codes:
        assert ("cgcompile_failure" in code) == (code in checked), "a loop without checks stays as it is"
    for code in checked:
        assert "#pragma omp" in code or torch.get_num_threads() == 1
        assert code.index("CgcompileFailure cgcompile_failure;") < code.index("for(")
        outside = re.sub(r"try\s*{.*?}\s*catch \(\.\.\.\)\s*{\s*cgcompile_failure\.keep\(\);\s*}", "", code, flags=re.DOTALL)
        assert "index out of bounds" not in outside
        assert re.search(r"cgcompile_failure\.pass_on\(\);\s*}$", code)


def test_a_torch_without_the_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cgcompile.targets.cpu import loops

    monkeypatch.setattr(loops, "PATCHED_METHODS", (("CppKernel", "gen_bodies"),))
    with (
        pytest.raises(loops.BuildError, match=r"Inductor has no CppKernel\.gen_bodies") as caught,
        loops.exceptions_after_loops(),
    ):
        pass
    assert caught.value.code == "torch-unsupported"
