"""Lists the runtime modules that loading a GPU bundle without state imports. Prints lines, and CPU time with and without bytecode.

    PYTHONPATH=.:cli:bundles python -m tests.bench.gpu_cold.imports [--runs 20] [OTHER_CHECKOUT ...]

The runs of all checkouts alternate; each is a new process.  The driver is `tests/helpers/drivers/null_driver.py`: no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from statistics import median

from tests.helpers.places import ROOT

TIMED = """
import sys, time
from importlib import import_module
begin = time.process_time()
for name in sys.argv[1:]:
    import_module(name)
print(time.process_time() - begin)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, help="others to compare with")
    parser.add_argument("--runs", type=int, default=20, help="processes of each kind (default: %(default)s)")
    options = parser.parse_args()
    checkouts = [ROOT, *[checkout.resolve() for checkout in options.checkouts]]
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch, "plain.cgb")
        import_module("tests.helpers.drivers.failing_gpu").write(bundle)
        names = [imported(checkout, bundle) for checkout in checkouts]
        bare = [Path(scratch, str(number)) for number in range(len(checkouts))]
        for checkout, copy in zip(checkouts, bare, strict=True):
            shutil.copytree(checkout / "bundles/cgbundle", copy / "cgbundle", ignore=shutil.ignore_patterns("__pycache__"))
        times: list[tuple[list[float], list[float]]] = [([], []) for _ in checkouts]
        for _ in range(options.runs):
            for checkout, copy, modules, (with_bytecode, without) in zip(checkouts, bare, names, times, strict=True):
                with_bytecode.append(seconds(checkout / "bundles", modules))
                without.append(seconds(copy, modules, PYTHONDONTWRITEBYTECODE="1"))
    for checkout, modules, kinds in zip(checkouts, names, times, strict=True):
        lines = sum(count_lines(checkout / "bundles", name) for name in modules)
        shown = ", ".join(
            f"{1e3 * median(kind):.1f} ms {how}" for kind, how in zip(kinds, ("with bytecode", "without"), strict=True)
        )
        print(f"{checkout}: {len(modules)} modules, {lines} lines, {shown}")


def imported(checkout: Path, bundle: Path) -> list[str]:
    """Returns the runtime modules that a load imports."""
    environment = os.environ | {"PYTHONPATH": f"{checkout}:{checkout / 'bundles'}"}
    command = [sys.executable, "-m", "tests.helpers.drivers.null_driver", str(bundle)]
    names: list[str] = json.loads(subprocess.run(command, cwd=checkout, env=environment, capture_output=True, check=True).stdout)
    return names


def seconds(folder: Path, modules: list[str], **variables: str) -> float:
    """Returns the CPU seconds of importing the modules in a new process."""
    environment = os.environ | {"PYTHONPATH": str(folder)} | variables
    return float(subprocess.run([sys.executable, "-c", TIMED, *modules], env=environment, capture_output=True, check=True).stdout)


def count_lines(folder: Path, name: str) -> int:
    path = folder.joinpath(*name.split("."))
    return len((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    main()
