"""Cross-compilation from a model file to a published bundle; kernels, plan and proof have separate tests."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from cgcompile.errors import CATALOGUE
from tests.helpers.lowered_here import lower_here
from tests.helpers.raising import raises

pytest.importorskip("triton")

import cgcompile
from cgbundle import self_test
from cgbundle.format import archive, file_names
from cgbundle.format.schema import Manifest
from cgbundle.validate import bundle as verify
from cgcompile.offline.trace import KERNELS
from cgcompile.targets.architectures import ARCHES
from cgcompile.targets.cuda.elf import EM_CUDA, read_cubin
from cgcompile_cli import main
from tests.helpers.drivers.cuda_calls import opened
from tests.helpers.drivers.fake_driver import FakeDriver, install

GPT = """
import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, TOKENS, WORDS = 32, 2, 8, 48


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks, self.norm = nn.Sequential(Block()), nn.LayerNorm(WIDTH)

    def forward(self, ids):
        return self.norm(self.blocks(self.words(ids) + self.places.weight)) @ self.words.weight.T


def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Gpt().eval()


def inputs(batch):
    return (torch.randint(0, WORDS, (batch, TOKENS)),)
"""
"""One layer, width 32: token ids -> logits."""

LINEAR = """
import torch


def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Linear(8, 4).eval()


def inputs(batch):
    return (torch.randn(batch, 8),)
"""

SPECTRUM = """
import torch


class Spectrum(torch.nn.Module):
    def forward(self, x):
        y = x * 2
        return torch.fft.rfft(y)


def model():
    return Spectrum().eval()


def inputs(batch):
    return (torch.randn(batch, 8),)
"""
"""Inductor calls cuFFT for the transform in line 8."""


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Hides the GPU and sets the time of manifests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the model files."""
    folder = tmp_path_factory.mktemp("models")
    for name, text in (("gpt", GPT), ("linear", LINEAR), ("spectrum", SPECTRUM)):
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def built(files: Path, tmp_path_factory: pytest.TempPathFactory) -> cgcompile.Built:
    out = tmp_path_factory.mktemp("hopper") / "gpt.cgb"
    return cgcompile.build(str(files / "gpt.py"), sizes=[2], out=out, target="sm_90")


@pytest.fixture(scope="module")
def hopper(built: cgcompile.Built) -> Path:
    return built.path


@pytest.fixture(scope="module")
def ampere(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ampere") / "gpt.cgb"
    with pytest.MonkeyPatch.context() as patch:
        lower_here(patch)
        return cgcompile.build(str(files / "gpt.py"), sizes=[2], out=out, target="sm_80").path


@pytest.fixture(params=["sm_90", "sm_80"])
def bundle(request: pytest.FixtureRequest) -> tuple[Path, str]:
    """Returns a GPT's bundle and its target."""
    path: Path = request.getfixturevalue("hopper" if request.param == "sm_90" else "ampere")
    return path, request.param


def call(*arguments: object) -> Result:
    """Runs a command as the shell would."""
    return CliRunner().invoke(main.app, [str(argument) for argument in arguments], prog_name="cgcompile", env={"COLUMNS": "80"})


def read(path: Path) -> Manifest:
    return archive.read_manifest(str(path))


def architecture(image: bytes) -> int:
    """Returns the compute capability in a cubin's header (90 for sm_90). It is in e_flags: in the second byte since version 8 of
    CUDA's ELF format (CUDA 13), before that in the first byte."""
    (machine,), (flags,) = struct.unpack_from("<H", image, 18), struct.unpack_from("<I", image, 48)
    assert machine == EM_CUDA
    version = image[8]
    return (flags >> 8 if version >= 8 else flags) & 0xFF


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# --- what is built ------------------------------------------------------------------------------------------------


def test_the_images_are_code_for_the_target(bundle: tuple[Path, str]) -> None:
    path, target = bundle
    images = sorted((path / "kernels").iterdir())
    assert images
    for image in images:
        assert f"sm_{architecture(image.read_bytes())}" == target
        assert read_cubin(image.read_bytes()).functions
    assert (read(path).target.kind, read(path).target.arch, read(path).target.torch) == ("cuda", target, "")


def test_the_time_of_the_verify_stage(built: cgcompile.Built) -> None:
    """The stage computes every hash and reads every table, but replays nothing."""
    assert 0.001 < dict(built.seconds)["verify"] < 60


def test_the_whole_model_is_one_graph_of_triton_kernels(bundle: tuple[Path, str]) -> None:
    path, _ = bundle
    symbols = {row["symbol"] for row in json.loads((path / KERNELS).read_text())}
    assert symbols and all(symbol.startswith("triton_") for symbol in symbols)
    assert any("triton_tem" in symbol for symbol in symbols), "products are Triton's, too"
    for program in read(path).entries[0].programs:
        assert [step.kind for step in program.steps] == ["graph"]


def test_verify_finds_nothing(bundle: tuple[Path, str]) -> None:
    path, _ = bundle
    verify.check_bundle(archive.Archive(str(path)), "full")
    assert verify.examine(archive.Archive(str(path))) == []
    result = call("verify", path)
    assert result.exit_code == 0 and "every hash and invariant holds" in result.stdout


def test_it_was_proved_by_interpretation(bundle: tuple[Path, str]) -> None:
    """Here with one int_key; tests/cpu/pipeline/test_build_host_regions.py tests several."""
    path, _ = bundle
    manifest = read(path)
    (proof,) = manifest.entries[0].self_test.proofs
    assert proof.key == (2,) and proof.method == "interpret" and 0 < proof.error <= proof.tolerance == 1e-4
    assert manifest.entries[0].self_test.compare == "tolerance"
    assert "interpret" in call("inspect", path).stdout


def test_the_self_test_is_eager_pytorch(hopper: Path, files: Path) -> None:
    """The stored outputs are the model's results for the stored inputs; `verify --run` on a GPU compares with them."""
    from safetensors.torch import load_file

    scope: dict[str, object] = {}
    exec((files / "gpt.py").read_text(), scope)
    stored = load_file(hopper / file_names.SELF_TEST)
    with torch.no_grad():
        expected = scope["model"]()(stored["2/input/0"])  # type: ignore[operator]
    torch.testing.assert_close(stored["2/output/0"], expected)


def test_another_gpu_is_refused_when_the_bundle_is_loaded(ampere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(arch=(9, 0))
    install(monkeypatch, fake)
    with raises("wrong-architecture", match=r"the bundle is for sm_80, device 0 \(Fake GPU\) is sm_90") as caught:
        opened(read(ampere), ampere)
    assert caught.value.exit_code == 2 and "--target sm_90" in caught.value.hint
    assert not fake.live


def test_a_machine_without_a_gpu_says_so(hopper: Path) -> None:
    answer = self_test.fresh(str(hopper))
    if "results" in answer:
        assert all(row["passed"] for row in answer["results"]), "a GPU of this architecture is here"
    else:
        assert answer["code"] in ("wrong-machine", "wrong-architecture", "driver-too-old", "library-missing")
        result = call("verify", hopper, "--run")
        assert result.exit_code == 2 and len(result.stderr.splitlines()) <= 2


# --- output of the commands ---------------------------------------------------------------------------------------


def test_inspect_lists_the_kernels_and_what_chose_them(hopper: Path) -> None:
    rows = json.loads(call("inspect", hopper, "--kernels", "--json").stdout)
    assert {row["image"] for row in rows} == {path.name for path in (hopper / "kernels").iterdir()}
    assert [row["launches"] for row in rows] == sorted([row["launches"] for row in rows], reverse=True)
    for row in rows:
        assert row["image_bytes"] == (hopper / "kernels" / row["image"]).stat().st_size
        assert row["symbol"] in read_cubin((hopper / "kernels" / row["image"]).read_bytes()).functions
        assert "warps=" in row["configuration"] and "stages=" in row["configuration"], row
        assert row["chosen"] in ("only", "table", "nearest", "heuristic")
    products = [row for row in rows if row["symbol"].startswith("triton_tem")]
    assert products and all("BLOCK_M=" in row["configuration"] for row in products)
    shown = call("inspect", hopper, "--kernels").stdout.splitlines()
    assert shown[0].split()[:5] == ["launches", "image", "sha256", "kernel,", "configuration"] and max(map(len, shown)) <= 80
    column = shown[0].index("kernel")
    assert [line[:column].split()[0] for line in shown[1:] if line[:column].strip()] == [str(row["launches"]) for row in rows]
    text = "".join([line[column:] for line in shown[1:]]).replace(" ", "")
    for row in rows:
        assert f"{row['symbol']}{row['configuration']}({row['chosen']})".replace(" ", "") in text


# --- equal inputs, equal bytes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unproved(files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Builds the bundle of `ampere` again by the command line, in other folders, with an empty cache, without a proof."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CGCOMPILE_CACHE", str(folder / "cache"))
        patch.setenv("TMPDIR", str(folder / "tmp"))
        patch.setattr("tempfile.tempdir", None)  # makes tempfile read TMPDIR again
        out = folder / "again.cgb"
        result = call("build", files / "gpt.py", "--sizes", "2", "--target", "sm_80", "--prove", "none", "-o", out)
    assert result.exit_code == 0, result.output
    assert any((folder / "cache").rglob("*")), "the images come from this build, not from the first one's cache"
    assert [path for path in (folder / "tmp").rglob("*") if path.is_file()] == [], "nothing is left behind"
    return out, result


def test_two_builds_in_different_folders_are_equal_byte_for_byte(ampere: Path, unproved: tuple[Path, Result]) -> None:
    first, second = contents(ampere), contents(unproved[0])
    assert {name.partition("/")[0] for name in first} > {"kernels", "graphs", KERNELS}
    assert first.keys() == second.keys()
    manifests = [json.loads(bundle_files.pop(file_names.MANIFEST)) for bundle_files in (first, second)]
    assert [name for name in first if first[name] != second[name]] == []
    for manifest in manifests:
        del manifest["entries"][0]["self_test"], manifest["sha256"]  # only one of the bundles has a proof
        manifest["provenance"]["options"] = [pair for pair in manifest["provenance"]["options"] if not pair[0].startswith("prove")]
    assert manifests[0] == manifests[1]


def test_a_build_without_a_proof_says_so(unproved: tuple[Path, Result]) -> None:
    path, result = unproved
    assert [proof.method for proof in read(path).entries[0].self_test.proofs] == ["none"]
    assert "interpret" not in result.stderr and "compared with eager" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("proof ")]
    assert "not " in line and "--run" in line
    shown = [line.split() for line in call("inspect", path).stdout.splitlines()]
    (row,) = [line for line in shown if "none" in line and "graph" in line]
    assert "0.0e+00" not in row, "no error was measured"


def test_int_keys_over_the_budget_are_left_out_and_named(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_here(monkeypatch)
    out = tmp_path / "linear.cgb"
    result = call("build", files / "linear.py", "--sizes", "1,4", "--target", "sm_90", "--prove-budget", "0.01", "-o", out)
    assert result.exit_code == 0, result.output
    assert [(proof.key, proof.method) for proof in read(out).entries[0].self_test.proofs] == [((1,), "interpret"), ((4,), "none")]
    assert read(out).entries[0].self_test.proofs[0].error <= 1e-4
    lines = result.stderr.splitlines()
    begun, stage = [line for line in lines if line.startswith("interpret")]
    assert " ... " in begun and "1 of 2 int_keys" in stage and stage.endswith("; not in 0.01 s: batch=4")
    first = next(i for i, line in enumerate(lines) if line.startswith("proof "))
    assert "1 of 2 int_keys interpreted" in lines[first] and " s (limit 0.01 s)" in lines[first]
    assert "1 of 2 int_keys not proved: 4: " in lines[first + 1], lines
    assert call("verify", out).exit_code == 0


# --- what is refused ----------------------------------------------------------------------------------------------


def test_an_operation_without_a_triton_kernel_is_named_with_the_users_line(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "spectrum.cgb"
    result = call("build", files / "spectrum.py", "--sizes", "2", "--target", "sm_90", "-o", out, "-q")
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    first, second = result.stderr.splitlines()
    assert first.startswith("error: ") and second.startswith("hint: ")
    assert "fft_rfft" in first and f"{files / 'spectrum.py'}:8" in first and "no Triton kernel" in first
    assert CATALOGUE["operator-without-kernel"].exit_code == 1 and CATALOGUE["operator-without-kernel"].hint in second
    assert list(tmp_path.iterdir()) == [], "nothing is published, nothing is left"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "sm_90", "--lower", "eager"], "lower 'eager': cross-compiling for sm_90 has one lowering, inductor"),
        (["--target", "sm_90", "--lower", "max-autotune"], "lower 'max-autotune': cross-compiling for sm_90"),
        (["--target", "sm_77"], "target 'sm_77': no such architecture"),
        (["--target", "sm_90", "--specialize", "shared"], "specialize 'shared': cross-compiling for sm_90"),
        (["--target", "sm_90", "--record", "capture"], "target sm_90: this machine has no GPU, and a capture needs this GPU"),
        (["--target", "cuda"], "target cuda: there is no GPU on this machine"),
        (["--record", "cross-compile"], "target auto: there is no GPU on this machine"),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, list) else "",
)
def test_what_a_target_cannot_do_is_said_before_anything_runs(options: list[str], said: str, files: Path, tmp_path: Path) -> None:
    result = call("build", files / "linear.py", "--sizes", "1", *options, "-o", tmp_path / "linear.cgb")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    first, *rest = result.stderr.splitlines()
    assert first.startswith(f"error: {said}")
    assert len(rest) == 1 and rest[0].startswith("hint: ")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_target_is_told_the_known_ones(files: Path) -> None:
    result = call("build", files / "linear.py", "--sizes", "1", "--target", "sm_77")
    assert all(row.name in result.stderr for row in ARCHES)


def test_a_bundle_that_exists_is_not_built_again(hopper: Path, files: Path) -> None:
    before = contents(hopper)
    with raises("output-exists"):
        cgcompile.build(str(files / "gpt.py"), sizes=[1], out=hopper, target="sm_90")
    assert contents(hopper) == before
