"""Families of decoders with paged attention equal transformers' `generate` or are refused; the comparison detects faults."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cgcompile.errors import ModelError  # noqa: E402
from cgcompile.language_models import causal_lm, positions  # noqa: E402
from cgcompile.language_models.architectures.lane_cache import Kept, LaneCache, State  # noqa: E402
from cgcompile.language_models.attention import Lanes, Pages  # noqa: E402
from cgcompile.language_models.comparison import cache_probe  # noqa: E402
from cgcompile.language_models.comparison.probe import window_and_chunk  # noqa: E402
from cgcompile.language_models.comparison.refusal import refusal  # noqa: E402
from cgcompile.language_models.comparison.small_copy import CHUNK, CONTEXT, WINDOW, small_copy  # noqa: E402
from cgcompile.model.user_code import call_user  # noqa: E402
from tests.families.__main__ import judged, judged_half  # noqa: E402
from tests.families.cases import FEATURES  # noqa: E402


@pytest.mark.parametrize(
    "name",
    [
        "llama4_text", "gemma3_text", "deepseek_v3", "llama, dynamic rope", "llama, long rope", "phi3, long rope",
        "phimoe, long rope", "ministral3, temperatures", "whisper",
        # with their own attention: ALiBi twice, a window, arguments that are not passed on, two softmaxes, an index of tokens
        "bloom", "falcon, biases of distances", "gpt_neo", "stablelm", "diffllama", "deepseek_v32",
        # with states: Mamba, Mamba 2 beside attention and experts, convolutions, delta rules, linear attention, gated units
        "mamba", "jamba", "zamba2", "lfm2, convolutions", "qwen3_next", "minimax", "recurrent_gemma",
    ],
)  # fmt: skip
def test_text_is_transformers(name: str) -> None:
    assert judged(name) == "equal"


@pytest.mark.parametrize("name", ["gemma3", "llama4", "qwen2_5_vl", "qwen3_5", "aya_vision"])
def test_a_text_half_is_taken_out_of_its_folder(name: str) -> None:
    """The folder contains the complete model. Its logits count: those of Aya Vision are not scaled, unlike those of its decoder
    alone."""
    assert judged_half(name, 18) == "equal"


def test_older_code_finds_states_in_the_layers_of_the_cache() -> None:
    """transformers 5.17 reads states from the layers; 5.23 calls get_conv_state() and get_recurrent_state()."""
    states = [State("conv", 1, 0, (2, 3), torch.float32), State("recurrent", 1, 1, (4,), torch.float32)]
    one = torch.ones(1, dtype=torch.int64)
    tokens = Pages([], [], [], Lanes(one, one, torch.zeros(1, 2, dtype=torch.int64)), 1)
    cache = LaneCache(tokens, Kept([], {}, states, True), [torch.zeros(1, 2, 3), torch.ones(1, 4)])
    cache.update_conv_state(torch.full((1, 2, 1), 5.0), 1)
    assert torch.equal(cache.layers[1].conv_states[0], torch.tensor([[[0.0, 0, 5], [0, 0, 5]]]))
    assert cache.layers[1].recurrent_states[1] is cache.get_recurrent_state(1, 1)
    assert not cache.layers[1].record_past and not cache.layers[0].conv_states


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bart", "it counts positions itself"),
        ("roformer", "it counts positions itself and ignores position_ids"),
        ("deepseek_v4", "layer 0 keeps a DeepseekV4HCACache, which is more than keys, values and states"),
        ("openai-gpt", "OpenAIGPTLMHeadModel has no cache of earlier tokens"),
        ("moshi", "the cache of layer 0 keeps 8 tokens, and its mask shows all"),
        ("phi4_multimodal", "generate drops earlier tokens"),
        ("musicgen", "it has no one text model"),
    ],
)
def test_refused_by_name(name: str, why: str) -> None:
    verdict = judged(name)
    assert verdict.startswith(f"refused: model_type {name.partition(',')[0].removesuffix('_text')}") and why in verdict


@pytest.mark.parametrize(
    ("name", "fault", "token"),
    [
        ("llama4_text", "chunk", "token 10 of a prompt of length 3"),
        ("mistral", "window", "token 6 of a prompt of length 3"),
        ("llama, long rope", "length", "token 0 of a prompt of length 30"),
        ("llama, dynamic rope", "length", "token 0 of a prompt of length 30"),
        ("phi3, long rope", "reread", "token 8 of a prompt of length 17"),
        ("llama4_text", "temperature", "token 9 of a prompt of length 3"),
        ("mamba", "old state", "token 0 of a prompt of length 3"),
    ],
)
def test_the_comparison_notices(monkeypatch: pytest.MonkeyPatch, name: str, fault: str, token: str) -> None:
    probe_layers = cache_probe.probe_layers
    if fault in ("chunk", "window"):
        blind = lambda network: [layer._replace(**{fault: 0}) for layer in probe_layers(network)]  # noqa: E731
        monkeypatch.setattr(cache_probe, "probe_layers", blind)
        monkeypatch.setattr(cache_probe, "check_windows", lambda config, layers: None)
    elif fault == "length":
        monkeypatch.setattr(causal_lm, "with_length", lambda places, length: positions.with_length(places, None))
    elif fault == "reread":
        monkeypatch.setattr(causal_lm, "reread_length", lambda network: 0)
    elif fault == "old state":  # the state of the text that used the slot before
        monkeypatch.setattr(causal_lm, "where_lanes", lambda on, new, old: new)
    else:
        monkeypatch.setattr(causal_lm, "temperatures_by_place", lambda network: network)
    assert token in judged(name)


def test_a_ropes_factors_do_not_depend_on_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In transformers the longest text of a call selects the factors for all texts."""
    monkeypatch.setattr(causal_lm, "ropes_by_length", lambda network: network)
    monkeypatch.setattr(causal_lm, "depends_on_length", lambda config: False)
    for name in ("llama, long rope", "llama, dynamic rope"):
        assert "depends on the other tokens of the call, in LlamaRotaryEmbedding" in judged(name)


def test_windows_and_chunks_are_read_from_rules() -> None:
    from transformers import masking_utils as rules

    padding = torch.zeros(1, dtype=torch.int64)
    causal = rules.causal_mask_function
    assert window_and_chunk(causal, 5000) == (0, 0)
    assert window_and_chunk(rules.sliding_window_causal_mask_function(4096), 131072) == (4096, 0)
    assert window_and_chunk(rules.sliding_window_causal_mask_function(1), 131072) == (1, 0)
    assert window_and_chunk(rules.sliding_window_causal_mask_function(9000), 5000) == (0, 0), "longer than any text"
    assert window_and_chunk(rules.chunked_causal_mask_function(8192, padding), 131072) == (0, 8192)
    others: list[Any] = [
        rules.bidirectional_mask_function, rules.or_masks(causal, lambda batch, head, query, key: key < 4),
        rules.and_masks(causal, lambda batch, head, query, key: (key % 64 == 0) | (query - key < 64)),
        rules.and_masks(causal, rules.padding_mask_function(torch.ones(1, 3, dtype=torch.bool))),
    ]  # fmt: skip
    assert [window_and_chunk(rule, 5000) for rule in others] == [None] * len(others)


def test_a_small_copy_has_every_kind_of_layer() -> None:
    gemma = small_copy(transformers.AutoConfig.for_model("gemma3_text"))
    assert gemma.layer_types == ["sliding_attention", "full_attention"] and gemma.sliding_window == WINDOW
    llama = small_copy(transformers.AutoConfig.for_model("llama4_text"))
    assert llama.layer_types == ["chunked_attention", "full_attention"] and llama.no_rope_layers == [1, 0]
    assert llama.attention_chunk_size == llama.floor_scale == CHUNK
    phi = small_copy(transformers.AutoConfig.for_model(**FEATURES["phi3, long rope"]))
    assert phi.original_max_position_embeddings == phi.rope_parameters["original_max_position_embeddings"] == CONTEXT
    assert phi.max_position_embeddings == CONTEXT * 32 and len(phi.rope_parameters["long_factor"]) == 8


def test_a_build_shows_the_refusal_as_one_line() -> None:
    def model() -> None:
        raise refusal(transformers.AutoConfig.for_model("bloom"), "its masks are its own", "serve it with transformers")

    with pytest.raises(ModelError) as caught:
        call_user(model, "model()", "causal_lm.py")
    assert str(caught.value) == "model_type bloom: its masks are its own"
    assert caught.value.hint == "serve it with transformers" and caught.value.code == "language-model-refused"
