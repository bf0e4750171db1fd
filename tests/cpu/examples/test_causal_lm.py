"""cgcompile.language_models: the tokens of transformers for each family, with shared pages; sampling; the kernel."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.places import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import cgbundle  # noqa: E402
from cgcompile.language_models.causal_lm import CausalLM  # noqa: E402
from cgcompile.language_models.comparison.texts import by_generate, small_networks  # noqa: E402
from cgcompile.language_models.example_inputs import ExampleInputs  # noqa: E402
from cgcompile.language_models.kernels.int8 import quantize_linear_layers  # noqa: E402
from cgcompile.language_models.sampling import (  # noqa: E402
    BIASES,
    Restriction,
    Sampling,
    exponential,
    filtered,
    sample,
    words_of,
)
from cgcompile.language_models.settings import PAGE  # noqa: E402
from tests.families.cases import FEATURES  # noqa: E402
from tests.helpers.bundles.llama_bundle import llama_bundle  # noqa: E402
from tests.helpers.models.causal_lm import (  # noqa: E402
    FAMILIES,
    PAGES,
    SLOTS,
    TURNS,
    Engine,
    causal_model,
    check_family,
    check_requests,
    nobodys_page_is_zero,
    prompt,
    reference,
)  # fmt: skip
from tests.helpers.models.language_models import configuration  # noqa: E402


@pytest.fixture(scope="module")
def llama() -> Any:
    return causal_model("llama")


# --- the tokens of transformers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_transformers(family: str) -> None:
    check_family(family)


def test_pages_are_used_again_by_requests_that_come_and_go(llama: Any) -> None:
    check_requests(Engine(llama), llama)
    assert nobodys_page_is_zero(llama)


@pytest.mark.parametrize("entry", ["prefill", "decode", "generate"])
def test_a_lane_that_is_off_changes_nothing(llama: Any, entry: str) -> None:
    before = {name: buffer.clone() for name, buffer in llama.named_buffers() if name.startswith(("keys", "values", "seen"))}
    getattr(Engine(llama), entry)(*[[]] * (2 if entry == "generate" else 1))
    assert all(torch.equal(buffer, before[name]) for name, buffer in llama.named_buffers() if name in before)


def test_generate_stops_at_stop_tokens_and_limits(llama: Any) -> None:
    engine = Engine(llama)
    engine.add("a", prompt(9), 60)
    engine.run("a", 1)
    wanted = reference(llama, prompt(9), 41)
    outputs = engine.generate(["a"], [3])
    assert outputs["tokens"][0].tolist() == wanted[1:4] + [-1] * (TURNS - 3) and outputs["count"].tolist() == [3, 0, 0, 0]
    place = next(place for place in range(6, 40) if wanted[place] not in wanted[4:place])
    outputs = engine.generate(["a"], [TURNS], (127, wanted[place]))
    assert engine.texts["a"]["tokens"][9:] == wanted[: place + 1], "the stop token is the last"
    engine.decode(["a"])
    assert engine.remove("a")[-1] == wanted[place + 1], "and what the loop read is in the pages"


# --- sampling -------------------------------------------------------------------------------------------------------


def test_a_lanes_token_does_not_depend_on_other_lanes(llama: Any) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "penalty": 1.2}
    alone = []
    for seed in (1, 2, 1):
        engine = Engine(llama)
        engine.add("a", prompt(11), 40, seed=seed, **sampling)
        engine.run("a", 20)
        alone.append(engine.remove("a")[11:])
    assert alone[0] == alone[2] != alone[1]
    engine = Engine(llama)
    engine.add("b", prompt(30), 40, temperature=1.5, seed=7)
    engine.run("b", 3)
    engine.add("a", prompt(11), 40, seed=1, **sampling)
    engine.prefill(["a"])
    for _ in range(9):
        engine.decode(["b", "a"])
    engine.generate(["b", "a"], [10, 10])
    assert engine.remove("a")[11:] == alone[0]


def test_temperature_draws_from_the_softmax() -> None:
    rows, logits = 20_000, torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    sampling = Sampling(*[torch.full((rows,), value) for value in (0.7, 0, 1.0, 1.0, 11, 0, 0.0, 0)])
    drawn = sample(logits.expand(rows, -1), torch.zeros(rows, 5, dtype=torch.bool), torch.arange(rows), sampling)
    share = torch.bincount(drawn, minlength=5) / rows
    torch.testing.assert_close(share, torch.softmax(logits / 0.7, 0), rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("k", "p", "least"), [(0, 0.9, 0.0), (1, 0.5, 0.0), (20, 1.0, 0.0), (700, 0.3, 0.0), (30, 0.8, 0.1), (0, 1.0, 0.02)]
)
def test_filters_leave_what_transformers_leave(k: int, p: float, least: float) -> None:
    torch.manual_seed(k)
    logits = torch.randn(1, 500) * 3
    wanted = transformers.TopKLogitsWarper(k)(None, logits) if k else logits
    wanted = transformers.TopPLogitsWarper(p)(None, wanted) if p < 1 else wanted
    wanted = transformers.MinPLogitsWarper(least)(None, wanted) if least else wanted
    assert torch.equal(filtered(logits, torch.tensor([k]), torch.tensor([p]), torch.tensor([least])), wanted)


def test_the_penalty_is_transformers(llama: Any) -> None:
    engine = Engine(llama)
    engine.add("a", prompt(20), 40, penalty=1.3)
    engine.run("a", 30)
    assert engine.remove("a")[20:] == reference(llama, prompt(20), 30, repetition_penalty=1.3)


def test_log_probabilities(llama: Any) -> None:
    engine = Engine(llama)
    engine.add("a", prompt(10), 40, alternatives=5)
    outputs = engine.prefill(["a"])
    llama.network.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = llama.network(torch.tensor([prompt(10)])).logits[0, -1].log_softmax(-1)
    llama.network.set_attn_implementation("paged")
    best = wanted.topk(20)
    assert outputs["top_token"][0].tolist() == best.indices.tolist() and outputs["token"][0] == best.indices[0]
    torch.testing.assert_close(outputs["top_logprob"][0], best.values)
    torch.testing.assert_close(outputs["logprob"][0], best.values[0])


def test_random_words_are_philox() -> None:
    """Random123's known answer of philox2x32-10 for zeros is ff1dae59."""
    word = torch.tensor(0xFF1DAE59, dtype=torch.float64)
    wanted = -torch.log1p(-(word + 0.5) / 2**32).float()
    torch.testing.assert_close(exponential(torch.tensor([0]), torch.tensor([0]), 1)[0, 0], wanted, rtol=1e-4, atol=0)
    assert 0.99 < exponential(torch.tensor([5]), torch.tensor([9]), 200_000).mean() < 1.01


# --- restrictions -----------------------------------------------------------------------------------------------------


def restriction(allowed: Sequence[int], biases: dict[int, float], lanes: int, *, fresh: int = 0) -> Restriction:
    """Returns the same restriction for every lane."""
    words = [0] * words_of(128)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    words = [word - (word >> 31 << 32) for word in words]
    tokens = [*biases, *[next(iter(biases), 0)] * (BIASES - len(biases))]
    rows = torch.tensor([words] * lanes, dtype=torch.int32), torch.tensor([tokens] * lanes)
    return Restriction(*rows, torch.tensor([[biases.get(token, 0.0) for token in tokens]] * lanes), torch.full((lanes,), fresh))


def test_a_restricted_token_is_the_likeliest_of_those_that_may_come(llama: Any) -> None:
    """Masks and biases stay in a slot until a call clears them. A lane that is not deferred stores none."""
    plain, engine = Engine(llama), Engine(llama)
    for instance, options in ((plain, {"alternatives": 20}), (engine, {"deferred": 1})):
        instance.add("a", prompt(9), 40, **options)
        instance.slots, instance.texts["a"]["slot"] = [*range(3, SLOTS)], 2 if instance is engine else 1
    outputs = plain.prefill(["a"])
    ranked, logprobs = outputs["top_token"][0].tolist(), outputs["top_logprob"][0].tolist()
    engine.prefill(["a"])
    assert not llama.deferred[1].any() and llama.deferred[2].any() and nobodys_page_is_zero(llama)
    slot, place = torch.tensor([2, 0]), torch.tensor([9, 0])
    sampling = engine._lanes(["a"])[-1]
    sampling = Sampling(*[tensor[:2] for tensor in sampling])

    def chosen(*arguments: Any, **options: Any) -> tuple[int, float]:
        choice = llama.choose(slot, place, sampling, restriction(*arguments, 2, **options))
        return choice["token"][0].item(), choice["logprob"][0].item()

    everything = [*range(128)]
    assert chosen(everything, {}, fresh=1) == (ranked[0], pytest.approx(logprobs[0]))
    assert chosen(ranked[3:5], {}) == (ranked[3], pytest.approx(logprobs[3])), "as likely as before the mask"
    assert chosen([ranked[7], 31], {}, fresh=1)[0] == ranked[7]
    assert chosen(everything, {ranked[5]: 100.0})[0] == ranked[5]
    assert chosen(everything, {ranked[6]: 90.0})[0] == ranked[5] == chosen(everything, {})[0], "the slot keeps it"
    assert chosen(everything, {ranked[5]: -100.0})[0] == ranked[6]
    assert chosen(everything, {}, fresh=1)[0] == ranked[0] and nobodys_page_is_zero(llama)


# --- a bundle ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Path:
    """Returns a folder with a Llama of one layer, and its bundle without `generate`, which takes two minutes to build."""

    return llama_bundle()


def test_a_bundle_gives_the_same_tokens(folder: Path) -> None:
    model = causal_model(str(folder / "llama"))
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "penalty": 1.1, "seed": 3, "alternatives": 2}
    runs = []
    with cgbundle.load(folder / "llama.cgb") as program:
        for entries in (program, model):
            random.seed(0)
            engine, texts = Engine(entries, lanes=2, blocks=4), []
            engine.add("greedy", prompt(21), 40)
            engine.add("drawn", prompt(3), 40, **sampling)
            first = engine.prefill(["greedy", "drawn"])
            engine.prefill(["greedy"])
            for _ in range(11):
                outputs = engine.decode(["drawn", "greedy"])
            texts.append(engine.remove("greedy"))
            engine.add("later", prompt(30), 20)
            engine.run("later", 4)
            engine.decode(["drawn"])
            texts += [engine.remove("drawn"), engine.remove("later")]
            runs.append((texts, first["logprob"], outputs["top_logprob"]))
        assert not any(torch.from_dlpack(program.state[name])[0].any() for name in ("keys_0", "values_0", "seen"))
    assert runs[0][0] == runs[1][0]
    assert runs[0][0][0][21:] == reference(model, prompt(21), 12) and runs[0][0][2][30:] == reference(model, prompt(30), 4)
    torch.testing.assert_close(runs[0][1:], runs[1][1:], rtol=1e-4, atol=1e-5)


def test_a_bundle_chooses_among_the_tokens_that_may_come(folder: Path) -> None:
    """Greedy and sampled tokens, with biases that are stored in a slot, equal those of the model in eager PyTorch."""
    model, runs = causal_model(str(folder / "llama")), []
    with cgbundle.load(folder / "llama.cgb") as program:
        for entries in (program, model):
            engine, texts = Engine(entries, lanes=2, blocks=4), []
            engine.add("greedy", prompt(9), 20, deferred=1, alternatives=2)
            engine.add("drawn", prompt(5), 20, deferred=1, temperature=0.9, min_p=0.01, seed=5)
            engine.prefill(["greedy", "drawn"])
            start, _, slot, sampling = engine._lanes(["greedy", "drawn"])
            for turn in range(3):
                constraint = restriction(range(60 + turn, 128), {70 + turn: 2.5, 90: -1.0}, 2, fresh=int(turn == 0))
                with torch.no_grad():
                    texts.append(entries.choose(slot, start + turn, sampling, constraint))
            runs.append(texts)
    for ours, eager in zip(*runs, strict=True):
        assert torch.equal(ours["token"], eager["token"]) and (eager["token"] >= 60).all()
        torch.testing.assert_close(ours["logprob"], eager["logprob"], rtol=1e-4, atol=1e-5)
        assert torch.equal(ours["top_token"], eager["top_token"])


# --- the scheduler of `cgcompile serve` ----------------------------------------------------------------------------------


def as_program(model: Any) -> Any:
    """Wraps the model so that `cgserve.language.bundle_model` can use it as a loaded bundle: prefill with 2 lanes of 8 or 16
    tokens, decode with 1 or 4 lanes, generate with 4, tables of 4 or 12 pages."""

    def tensors(value: Any) -> Any:
        return Sampling(*map(torch.from_dlpack, value)) if isinstance(value, tuple) else torch.from_dlpack(value)

    def entry(name: str, **sizes: list[int]) -> Any:
        def call(*arguments: Any) -> Any:
            shape = {"ids": arguments[0].shape, "pages": arguments[2 if name == "generate" else 3].shape}
            key = (shape["ids"][0], *([shape["ids"][1]] if name == "prefill" else []), shape["pages"][1])
            assert key in call.int_keys, "a size that was recorded"
            with torch.no_grad():
                return getattr(model, name)(*map(tensors, arguments))

        call.int_keys = tuple(itertools.product(*sizes.values()))
        call.spec = SimpleNamespace(dimensions=[SimpleNamespace(name=size) for size in sizes])
        call.inputs = [SimpleNamespace(name="length")] * (name == "prefill" and model.by_length)
        call.outputs = [
            SimpleNamespace(name="count", shape=("batch",)),
            SimpleNamespace(name="tokens", shape=("batch", model.turns)),
        ]
        return call

    entries = [
        entry("prefill", batch=[2], seq=[8, 16], blocks=[4, 12]), entry("decode", batch=[1, 4], blocks=[4, 12]),
        entry("generate", batch=[4], blocks=[12]),
    ]  # fmt: skip
    weights = [SimpleNamespace(name=name, shape=tuple(value.shape)) for name, value in model.named_buffers()]
    names = ("prefill", "decode", "generate")
    return SimpleNamespace(entries=dict(zip(names, entries, strict=True)), manifest=SimpleNamespace(weights=weights))


@pytest.mark.parametrize(("turns", "pages"), [(1, 65), (8, 65), (8, 10)])
def test_scheduled_tokens_are_transformers(turns: int, pages: int) -> None:
    from cgserve.language.bundle_model import BundleModel
    from cgserve.scheduling.requests import Request, Sampling
    from cgserve.scheduling.scheduler import Scheduler

    llama = causal_model("llama", turns=8)
    model = BundleModel(as_program(llama), turns)
    limits = model.limits
    assert (limits.readers, limits.chunk, limits.lanes, limits.loop_lanes, limits.turns) == ((2,), 16, 4, 4, turns)
    scheduler = Scheduler(replace(limits, pages=pages))
    wanted, texts, entries = {}, {}, set()
    for length in (5, 70, 23, 1, 40):
        wanted[length] = reference(llama, prompt(length), 20)
        stop = wanted[length][12] if length == 23 else -1
        wanted[length] = wanted[length][: wanted[length].index(stop) + 1] if stop >= 0 else wanted[length]
        request = Request(prompt=tuple(prompt(length)), most=20, stop=(stop,) * (stop >= 0), sampling=Sampling(temperature=0.0))
        scheduler.add(length, request)
    while (step := scheduler.next()) is not None:
        entries.add(step.entry)
        for progress in scheduler.finish(model.prepare(step)(None).rows()):
            texts[progress.key] = texts.get(progress.key, []) + [token.id for token in progress.tokens]
    assert texts == wanted and scheduler.pages.taken == 0 and nobodys_page_is_zero(llama)
    assert ("generate" in entries) == (turns > 1) and (scheduler.preempted > 0) == (pages == 10)


@pytest.mark.parametrize("turns", [1, 8])
@pytest.mark.parametrize("name", ["phi3, long rope", "llama, long rope", "llama, dynamic rope"])
def test_scheduled_texts_pass_their_first_context(name: str, turns: int) -> None:
    """After 24 tokens, Phi-3 recomputes its text with new rope factors; other models continue. Requests share calls, and some lose
    their pages."""
    from cgserve.language.bundle_model import BundleModel
    from cgserve.scheduling.requests import Request, Sampling
    from cgserve.scheduling.scheduler import Scheduler

    config = transformers.AutoConfig.for_model(**FEATURES[name])
    network, reference = small_networks(config)
    bundle = BundleModel(as_program(CausalLM(network, PAGES, SLOTS, 8)), turns)
    scheduler = Scheduler(replace(bundle.limits, pages=8))
    prompts, texts, expected = {length: prompt(length) for length in (5, 17, 24, 30, 40)}, {}, {}
    for length, ids in prompts.items():
        expected[length] = [written.token for written in by_generate(deepcopy(reference), ids, 20)]
        scheduler.add(length, Request(prompt=tuple(ids), most=20, sampling=Sampling(temperature=0.0)))
    while (step := scheduler.next()) is not None:
        for progress in scheduler.finish(bundle.prepare(step)(None).rows()):
            texts[progress.key] = texts.get(progress.key, []) + [token.id for token in progress.tokens]
    assert texts == expected and scheduler.preempted > 0 and scheduler.pages.taken == 0


def test_shared_prefixes_change_no_bit(folder: Path) -> None:
    """Requests with the same 32 first tokens, greedy and sampled, give the same bits with shared pages and without."""
    from cgserve.language.bundle_model import BundleModel
    from cgserve.scheduling.requests import Request, Sampling
    from cgserve.scheduling.scheduler import Scheduler

    rows, read = [], []
    requests = [
        Request(prompt=tuple(prompt(33) + prompt(number)), most=12, sampling=Sampling(temperature=number % 2, seed=number))
        for number in range(1, 9)
    ]
    with cgbundle.load(folder / "llama.cgb") as program:
        model = BundleModel(program, 1)
        assert model.limits.shared and model.limits.several
        for shared in (False, True):
            scheduler, output, texts = Scheduler(replace(model.limits, shared=shared)), None, dict[int, list[Any]]()
            for key, request in enumerate(requests):
                scheduler.add(key, request)
            steps, count = [], 0
            while (step := scheduler.next()) is not None or steps:
                if step is not None:  # as in an engine, a step is prepared before the previous step's tokens are read
                    count += sum(len(lane.ids) for lane in step.lanes if step.entry == "prefill")
                    output = model.prepare(step)(output)
                    steps.append(output)
                else:
                    for progress in scheduler.finish(steps.pop(0).rows()):
                        texts.setdefault(progress.key, []).extend(progress.tokens)
            rows.append(texts)
            read.append(count)
            assert scheduler.pages.taken == 0 and scheduler.shared == (7 * 32 if shared else 0)
    assert rows[0] == rows[1] and len(rows[0]) == 8, "tokens and their log-probabilities"
    assert read == [sum(len(request.prompt) for request in requests), read[0] - 7 * 32]


# --- the model file and the kernel -------------------------------------------------------------------------------------


def test_weights_of_a_folder(llama: Any, tmp_path: Any) -> None:
    llama.network.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = causal_model(str(tmp_path)).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in llama.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_weights_of_eight_bits(family: str) -> None:
    small, twin = causal_model(family), causal_model(family)
    before = sum(parameter.numel() * parameter.element_size() for parameter in twin.network.parameters())
    quantize_linear_layers(small.network)
    layers = {name: module for name, module in small.network.named_modules() if hasattr(module, "scale")}
    tied = twin.network.get_output_embeddings().weight is twin.network.get_input_embeddings().weight
    for name, layer in layers.items():
        whole, plain = layer.weight * layer.scale[:, None], twin.network.get_submodule(name)
        old = plain.weight if isinstance(plain, torch.nn.Linear) else plain.weight.T
        assert ((whole - old).abs() <= 0.5001 * layer.scale[:, None]).all()
        plain.weight = torch.nn.Parameter(whole if isinstance(plain, torch.nn.Linear) else whole.T.contiguous())
    assert len(layers) >= 9 and layers[next(name for name in layers if "head" in name)].weight.dtype == torch.int8
    after = sum(tensor.numel() * tensor.element_size() for tensor in small.network.state_dict().values())
    assert after < 0.62 * before or tied, "embeddings stay"
    engine = Engine(small)
    engine.add("a", prompt(19), 24)
    engine.run("a", 24)
    assert engine.remove("a")[19:] == reference(twin, prompt(19), 24)


@pytest.mark.parametrize("batch", [1, 4, 70])
def test_inputs_share_no_page(batch: int) -> None:
    examples = ExampleInputs(config=configuration("llama"), pages=PAGES, slots=SLOTS, turns=TURNS)
    ids, count, start, pages, slot, _ = examples.prefill(batch, 24, 8)
    assert ids.shape == (batch, 24) and pages.shape == (batch, 8)
    live = pages[pages > 0].tolist()
    assert len(set(live)) == len(live) and len(set(slot[slot > 0].tolist())) == int((slot > 0).sum())
    assert ((start + count) <= (pages > 0).sum(1) * PAGE).all() and (count[slot == 0] == 0).all()
    assert (start <= 2 * count + PAGE).all(), "behind many tokens that no call has read, trained weights multiply rounding"


KERNEL = """
import torch
from cgcompile.language_models.kernels import decode as decode_kernel, int8, prefill as prefill_kernel
from tests.helpers.models.decode_cases import CASES, case, prompt_case
decode_kernel.PROGRAMS = 20  # two parts for each lane and key head: the interpreter is slow
for name, options in CASES.items():
    given = case(**options)
    for made, wanted in zip(decode_kernel.with_triton(*given), decode_kernel.with_pytorch(*given), strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5, msg=name)
prefill_kernel.ROWS, prefill_kernel.BLOCK = 16, 32
for name, options in CASES.items():
    *given, counts = prompt_case(**options)
    made, wanted = prefill_kernel.with_triton(*given), prefill_kernel.with_pytorch(*given)
    torch.testing.assert_close(made[counts], wanted[counts], rtol=1e-5, atol=1e-5, msg=name)
    assert made.isfinite().all()
for rows, depth, count in ((1, 48, 96), (5, 300, 20), (70, 64, 33)):
    layer = int8.Int8Linear(*int8.quantize_rows(torch.randn(count, depth)), None)
    given = torch.randn(rows, depth), layer.weight, layer.scale
    torch.testing.assert_close(int8.with_triton(*given), int8.with_pytorch(*given), rtol=1e-5, atol=1e-4)
"""


def test_the_kernels_under_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    path = os.pathsep.join([str(ROOT), str(ROOT / "bundles")])
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if "wrap_triton only works on functions annotated" in done.stderr:
        pytest.skip("this torch (2.11) takes no kernels of Triton's interpreter")
    assert done.returncode == 0, done.stderr[-2000:]
