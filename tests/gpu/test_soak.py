"""Half a minute of the soak test (`python -m tests.soak --gpu`) in 8 threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from tests.helpers.places import ROOT  # noqa: E402


@pytest.mark.alone
def test_eight_threads_get_right_answers_and_nothing_grows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak", "--gpu", "--minutes", "0.5", "--threads", "8", "--bundles", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "all answers were right, and nothing grew" in done.stdout
