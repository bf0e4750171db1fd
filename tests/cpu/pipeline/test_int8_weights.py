"""`cgcompile build FOLDER --weights int8`: the contents, reports and results of the bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgcompile.errors import BuildError, ModelError  # noqa: E402
from cgcompile.language_models.kernels.int8 import Int8Linear  # noqa: E402
from cgcompile.language_models.kernels.int8_network import Int8Embedding, int8_network, quantized  # noqa: E402
from tests.helpers.models.causal_lm import CausalLM, Engine, causal_model, prompt  # noqa: E402
from tests.helpers.models.language_models import network  # noqa: E402
from tests.helpers.models.random_llama import write_llama  # noqa: E402

SHAPE = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a Llama of one layer, whose head is tied to its embedding."""
    path = tmp_path_factory.mktemp("hub") / "Tied"
    write_llama(path, SHAPE)
    return path


def test_a_bundle_of_int8_weights(folder: Path, tmp_path: Path) -> None:
    """Tokens equal eager PyTorch with the same weights; head and embedding are one tensor, and `inspect` shows it."""
    built = cgcompile.build(str(folder), out=tmp_path / "x.cgb", target="cpu", context=64, lanes=[1], weights="int8")
    rows = {row.name: row for row in built.manifest.weights}
    large = {row.tensor: row.dtype for row in rows.values() if len(row.shape) == 2 and row.memory == "weights"}
    assert set(large.values()) == {"int8"} and len(large) == 8
    assert rows["network.lm_head.weight"].tensor == rows["network.model.embed_tokens.weight"].tensor
    findings = [finding for entry in built.manifest.entries for finding in entry.findings if finding.rule == "quantized-weights"]
    assert (
        findings
        and "weights are stored as int8: " in findings[0].message
        and "likeliest tokens are the same" in findings[0].message
    )
    model = CausalLM(int8_network(causal_model(str(folder)).network), 5, 2, 0)
    texts = []
    with cgbundle.load(tmp_path / "x.cgb") as program:
        for entries in (program, model):
            engine = Engine(entries, lanes=1, blocks=4, chunk=64)
            engine.free, engine.slots = [1, 2, 3, 4], [1]
            engine.add("text", prompt(20), 20)
            engine.run("text", 20)
            texts.append(engine.remove("text"))
    assert texts[0] == texts[1]


def test_layers_that_share_weights_share_them_still() -> None:
    whole = network("llama", torch.float32)
    whole.lm_head.weight = whole.model.embed_tokens.weight
    ids = torch.arange(4, 24)[None]
    whole.set_attn_implementation("eager")
    with torch.no_grad():
        before = whole(ids, use_cache=False).logits
    small, said = quantized(whole)
    assert isinstance(small.model.embed_tokens, Int8Embedding) and isinstance(small.lm_head, Int8Linear)
    assert small.lm_head.weight is small.model.embed_tokens.weight and said.after < 0.45 * said.before
    small.set_attn_implementation("eager")
    with torch.no_grad():
        assert (small(ids, use_cache=False).logits - before).norm() < 0.1 * before.norm()


def test_a_model_that_reads_weights_itself_is_refused() -> None:
    whole = network("llama", torch.float32)
    layer = whole.model.layers[0].self_attn
    whole.model.norm.register_forward_hook(lambda _, __, rows: rows + rows @ layer.q_proj.weight.T[:, :1] * 0)
    with pytest.raises(ModelError, match="model_type llama: its code does not run over int8 weights"):
        quantized(whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int3"}, "weights 'int3': expected int8"),
        ({"target": "sm_90"}, "weights int8: for processors, and the target is sm_90"),
        ({"dtype": "bfloat16"}, "weights int8: calls compute in float32, and the dtype is bfloat16"),
    ],
)  # fmt: skip
def test_what_is_refused(folder: Path, tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(BuildError, match=message) as caught:
        cgcompile.build(str(folder), out=tmp_path / "x.cgb", **{"target": "cpu", "weights": "int8"} | options)
    assert caught.value.code == "option-invalid"
