"""Generated code runs on any number of threads: nothing depends on the thread count of the build machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

NO_HEADERS = {"aot_inductor.precompile_headers": False}
"""Otherwise Inductor compiles headers for ten seconds, though none of its code is compiled here."""


class Sums(torch.nn.Module):
    """A sum over all elements, and a loop over a few."""

    def forward(self, x: Any, few: Any) -> tuple[Any, Any]:
        """Returns the sum of `x`, and `few` plus one."""
        return x.sum(), few + 1


def generated(folder: Path) -> str:
    """Returns the C++ kernels of `Sums`, without compiling them."""
    from cgcompile.targets.cpu.loops import threads_read_at_run_time

    inputs = (torch.zeros(1 << 20), torch.zeros(8))
    program = torch.export.export(Sums(), inputs)
    options = {"aot_inductor.package": True, "aot_inductor.package_cpp_only": True, "cpp.vec_isa_ok": True, **NO_HEADERS}
    with pytest.MonkeyPatch.context() as patch, threads_read_at_run_time():
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        files = torch._inductor.aot_compile(program.module(), inputs, options=options)
    assert isinstance(files, list)
    return "\n".join(Path(file).read_text() for file in files if str(file).endswith(".cpp"))


def test_no_number_of_threads_is_written_into_the_code(tmp_path: Path) -> None:
    if torch.get_num_threads() == 1:
        pytest.skip("on one thread Inductor makes no loop parallel")
    code = generated(tmp_path)
    assert re.findall(r"acc\w*_arr\[max_threads\]", code), "there is no parallel reduction to look at"
    assert not re.findall(r"acc\w*_arr\[\d+\]|num_threads\(\d", code)
    assert code.count("#pragma omp parallel") == 1, "a loop of a few elements is run by one thread"
