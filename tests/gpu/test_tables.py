"""Tables that the build computed, in a file beside the weights: replayed on a GPU, and used at every length."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import cgbundle
from cgbundle.format import archive, safetensors_files
from cgbundle.format.file_names import TABLES, WEIGHTS
from tests.gpu.helpers import self_tests
from tests.helpers.places import GOLDEN

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

BUNDLE = GOLDEN / "v1/traced_tables.cgb"


def model(weights: dict[str, numpy.ndarray], x: numpy.ndarray) -> numpy.ndarray:
    """Computes the model Positions of tests/golden/models.py with NumPy."""
    read = x @ weights["read.weight"].T + weights["read.bias"]
    return read + numpy.tanh(weights["places"][: len(x)] @ weights["mixed.weight"].T + weights["mixed.bias"])


@pytest.mark.parametrize("mode", ["graph", "stream"])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("weights", ["map", "copy"])
def test_every_length_has_its_table(mode: str, lazy: bool, weights: str) -> None:
    stored = safetensors_files.Mapped(str(BUNDLE / WEIGHTS), WEIGHTS)
    w = {name: numpy.frombuffer(stored.data(name), numpy.float32).reshape(entry.shape) for name, entry in stored.entries.items()}
    random = numpy.random.default_rng(0)
    with cgbundle.load(BUNDLE, mode=mode, lazy=lazy, weights=weights, check="full") as program:
        for length in (4, 6, 3, 5, 6, 4):
            x = random.standard_normal((length, 8), numpy.float32)
            assert numpy.abs(program(x) - model(w, x)).max() < 1e-5
        with program.session() as session:
            x = random.standard_normal((6, 8), numpy.float32)
            assert numpy.array_equal(session(x), program(x))


def test_the_self_test_and_a_file_that_is_cut(tmp_path: Path) -> None:
    self_tests.passed(BUNDLE)
    copy = Path(shutil.copytree(BUNDLE, tmp_path / "copy.cgb"))
    (copy / TABLES).write_bytes((copy / TABLES).read_bytes()[:-1])
    with pytest.raises(cgbundle.BundleError, match=TABLES):
        cgbundle.load(copy)


def test_an_update_leaves_tables_as_they_are() -> None:
    stored = safetensors_files.Mapped(str(BUNDLE / WEIGHTS), WEIGHTS)
    w = {
        name: numpy.frombuffer(stored.data(name), numpy.float32).reshape(entry.shape).copy()
        for name, entry in stored.entries.items()
    }
    x = numpy.ones((6, 8), numpy.float32)
    with cgbundle.load(BUNDLE) as program:
        w["read.bias"] += 1
        program.update({"read.weight": w["read.weight"], "read.bias": w["read.bias"]})
        assert numpy.abs(program(x) - model(w, x)).max() < 1e-5
        program.update(BUNDLE)
        assert numpy.abs(program(x) - (model(w, x) - 1)).max() < 1e-5


@pytest.mark.parametrize("record", ["cross-compile", "capture"])
def test_a_build_here_has_its_tables_beside_the_weights(record: str, tmp_path: Path) -> None:
    """Cross-compiled bundles have tables from constant folding, captured ones those of cuFFT."""
    import cgcompile
    from tests.golden import models

    network, inputs = models.traced_tables()
    chosen = {"target": "cuda", "record": "cross-compile"}
    if record == "capture":
        network, chosen = Spectrum(network), {"target": "cuda", "lower": "eager"}
    built = cgcompile.build(network.eval(), inputs, sizes=[2, 6], out=tmp_path / "made.cgb", **chosen)
    path = Path(built.path)
    names = safetensors_files.Mapped(str(path / WEIGHTS), WEIGHTS).entries.keys()
    assert names == network.state_dict().keys()
    assert any(weight.computed for weight in archive.read_manifest(str(path)).weights) and (path / TABLES).exists()
    self_tests.passed(path)
    x = torch.randn(6, 8, device="cuda")
    with cgbundle.load(path) as program, torch.inference_mode():
        assert (program(x) - network.cuda()(x)).abs().max() < 1e-4


class Spectrum(torch.nn.Module):
    """A Fourier transform after a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(self.model(x), n=1024).abs()
