"""LoRA adapters: the tokens of every lane equal those of the model merged with the lane's adapter."""

from __future__ import annotations

import asyncio
import copy
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
for package in ("safetensors", "triton", "starlette", "uvicorn", "prometheus_client", "tokenizers", "jinja2"):
    pytest.importorskip(package)

import cgcompile  # noqa: E402
from cgcompile.language_models.architectures.adapters import AdaptedLM  # noqa: E402
from cgcompile.language_models.comparison.texts import small_networks  # noqa: E402
from cgcompile.language_models.kernels.int8_network import int8_network  # noqa: E402
from tests.helpers.models.adapters import factors_of, merged, write_adapter  # noqa: E402
from tests.helpers.models.causal_lm import PAGES, SLOTS, Engine, prompt  # noqa: E402
from tests.helpers.models.language_models import network  # noqa: E402
from tests.helpers.models.tokenizers import write_tokenizer  # noqa: E402
from tests.helpers.places import ROOT  # noqa: E402

TOKENS = 12


def load(model: AdaptedLM, place: int, folder: Path) -> bool:
    """Loads an adapter into the bank of a model in eager PyTorch."""
    scale, adapter_factors = factors_of(folder)
    factors = {}
    for layers in model.alike:
        down = torch.zeros(len(layers.paths), model.rank, layers.inputs)
        up = torch.zeros(len(layers.paths), layers.outputs, model.rank)
        for number, path in enumerate(layers.paths):
            if path in adapter_factors:
                down[number, : len(adapter_factors[path][0])] = adapter_factors[path][0]
                up[number, :, : len(adapter_factors[path][0])] = adapter_factors[path][1]
        factors[layers.name] = down, up
    with torch.no_grad():
        return bool(model.load_adapter(torch.tensor([place]), torch.tensor([scale]), factors)["finite"])


def written(model: Any, tokens: list[int], count: int) -> list[int]:
    """Returns the most likely tokens after a text, computed by the model itself."""
    model.set_attn_implementation("eager")
    text = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(tokens) :]


def check_lanes(plain: Any, model: AdaptedLM, adapters: list[Path], chunk: int = 16) -> None:
    """Checks three texts in one batch: one for each adapter, one without."""
    assert all(load(model, place, folder) for place, folder in enumerate(adapters, 1))
    engine = Engine(model, blocks=4, chunk=chunk, adapters=True)
    for place in range(3):
        engine.add(place, prompt(19), 3 * TOKENS, place)
    while waiting := [name for name, text in engine.texts.items() if text["read"] < 19]:
        engine.prefill(waiting)
    for _ in range(TOKENS - 5):
        engine.decode([0, 1, 2])
    engine.generate([0, 1, 2], [4, 4, 4])
    texts = [engine.remove(place)[19:] for place in range(3)]
    models = [plain, *[merged(plain, folder) for folder in adapters]]
    assert texts == [written(network, prompt(19), TOKENS) for network in models]
    assert len({tuple(text) for text in texts}) == 3, "each adapter writes another text"


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", "mixtral"])
def test_lanes_have_adapters_of_their_own(family: str, tmp_path: Path) -> None:
    plain = network(family, torch.float32)
    model = AdaptedLM(copy.deepcopy(plain), PAGES, SLOTS, 8, 2, 6).eval()
    one = write_adapter(tmp_path / "one", plain, 6, 1)
    check_lanes(plain, model, [one, write_adapter(tmp_path / "two", plain, 2, 2, use_rslora=True)])


def test_a_model_that_is_called_by_lane(tmp_path: Path) -> None:
    """Jamba has states, and attention of transformers' own code."""
    network, reference = small_networks(transformers.AutoConfig.for_model("jamba"))
    model = AdaptedLM(network, PAGES, SLOTS, 8, 2, 4).eval()
    adapted = tuple({layers.name.rpartition(".")[2] for layers in model.alike})
    folders = [write_adapter(tmp_path / str(seed), reference, 4, seed, adapted) for seed in (1, 2)]
    layers = {path for layers in model.alike for path in layers.paths}
    assert all(factors_of(folder)[1].keys() <= layers for folder in folders)
    check_lanes(reference, model, folders)


def test_over_weights_of_eight_bits(tmp_path: Path) -> None:
    plain = network("llama", torch.float32)
    adapters = [write_adapter(tmp_path / str(seed), plain, 4, seed) for seed in (1, 2)]
    small = int8_network(copy.deepcopy(plain))
    for path, layer in small.named_modules():
        if hasattr(layer, "scale"):
            plain.get_submodule(path).weight.data = layer.weight.float() * layer.scale[:, None]
    check_lanes(plain, AdaptedLM(small, PAGES, SLOTS, 8, 2, 4).eval(), adapters)


def test_what_is_not_finite_becomes_zeros(tmp_path: Path) -> None:
    plain = network("llama", torch.float32)
    model = AdaptedLM(copy.deepcopy(plain), PAGES, SLOTS, 8, 2, 4).eval()
    folder = write_adapter(tmp_path / "one", plain, 4, 1)
    assert load(model, 1, folder) and not load(model, 2, write_adapter(tmp_path / "two", plain, 4, 1, lora_alpha=1e41))
    bank = model.adapters.get_submodule(model.alike[0].name)
    assert bank.up[:, 0].any() and not bank.up[:, 1].any() and not bank.down[:, 1].any()
    load(model, 0, folder)
    assert not bank.up[:, 1].any(), "0 is none"


# --- a bundle -----------------------------------------------------------------------------------------------------------


class Served:
    """A served bundle with two adapters: of rank 4, and of rank 2 in bfloat16 for two kinds of layers."""

    def __init__(self, folder: Path) -> None:
        self.plain = network("llama", torch.float32)
        self.plain.save_pretrained(folder / "Tiny")
        write_tokenizer(folder / "Tiny", letters=120)
        targets = ("q_proj", "v_proj")
        self.folders = {
            "one": write_adapter(folder / "adapters/one", self.plain, 4, 1),
            "two": write_adapter(folder / "adapters/two", self.plain, 2, 2, targets, torch.bfloat16, target_modules=[*targets]),
        }
        options: dict[str, Any] = {"target": "cpu", "context": 64, "lanes": [2], "adapters": 2, "adapter_rank": 4}
        self.built = cgcompile.build(str(folder / "Tiny"), out=folder / "Tiny.cgb", **options)
        tree = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles")])
        self.command = [sys.executable, "-m", "cgcompile_cli", "serve", str(folder / "Tiny.cgb"), "--port", "0", "--threads", "1"]
        self.environment = os.environ | {"PYTHONPATH": tree}
        self.process = self.start("one", "two", "--adapter-root", str(folder / "adapters"))
        assert self.process.stderr is not None
        self.port = int(self.process.stderr.readline().rpartition(":")[2])
        assert self.process.stderr.readline().startswith("serving Tiny")

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Starts a server; names of adapters in `words` become --adapter options."""
        pairs = [["--adapter", f"{word}={self.folders[word]}"] if word in self.folders else [word] for word in words]
        command = [*self.command, *[word for pair in pairs for word in pair]]
        return subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith("{") else text

    def complete(self, name: str, tokens: list[int]) -> list[str]:
        body = {"model": name, "prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        status, response = self.ask("/v1/completions", body)
        assert status == 200 and response["model"] == name, response
        token_texts: list[str] = response["choices"][0]["logprobs"]["tokens"]
        return token_texts


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("hub"))
    yield server
    server.process.kill()
    server.process.wait()


def text(length: int, seed: int = 0) -> list[int]:
    """Returns a prompt of tokens that the tokenizer has."""
    return [3 + token % 110 for token in prompt(length, seed)]


def expected(served: Served, name: str, tokens: list[int]) -> list[str]:
    """Returns the text of the merged model, as a client receives it."""
    from cgserve.language.tokenizer import Language

    model = merged(served.plain, served.folders[name]) if name in served.folders else served.plain
    language = Language(served.built.path.parent / "Tiny")
    return [language.token_text(token) for token in written(model, tokens, TOKENS)]


def test_requests_choose_adapters_by_the_name_of_their_model(served: Served) -> None:
    """Prompts with a common prefix, in random order and more than there are lanes, get the texts of their adapters."""
    order = random.Random(0)
    asked = [(name, text(17) + text(4, seed)) for seed in range(3) for name in ("Tiny", "one", "two")] * 2
    order.shuffle(asked)
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda request: served.complete(*request), asked))
    assert texts == [expected(served, *request) for request in asked]
    names = [(model["id"], model.get("parent")) for model in served.ask("/v1/models")[1]["data"]]
    assert names == [("Tiny", None), ("one", "Tiny"), ("two", "Tiny")]
    assert served.ask("/v1/models/two")[1]["parent"] == "Tiny"
    status, response = served.ask("/v1/completions", {"model": "three", "prompt": "a"})
    assert (status, response["error"]["message"]) == (404, "no model 'three'; there is Tiny, one, two")
    assert served.ask("/health")[1]["torch"] is False


def test_adapters_come_and_go(served: Served) -> None:
    """An adapter that replaces another does not use pages cached with that one."""
    tokens = text(40)
    first = served.complete("two", tokens)
    request = {"lora_name": "again", "lora_path": "one"}
    status, refused = served.ask("/v1/load_lora_adapter", request)
    assert status == 400 and refused["error"]["message"].startswith("adapter 'again': the bundle holds 2 at a time")
    assert served.ask("/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 200
    assert served.ask("/v1/completions", {"model": "two", "prompt": "a"})[0] == 404
    assert served.ask("/v1/load_lora_adapter", request) == (200, "Success: LoRA adapter 'again' added successfully.")
    assert served.complete("again", tokens) == expected(served, "one", tokens) != first
    for body, why in (
        (request, "adapter 'again': the name is taken"), ({"lora_name": "x"}, "lora_path: expected a string"),
        (request | {"lora_path": ".."}, "lora_path: '..' does not lie in the folder of --adapter-root"),
        (request | {"rank": 3}, "rank: no such field"),
    ):  # fmt: skip
        status, refused = served.ask("/v1/load_lora_adapter", body)
        assert (status, refused["error"]["message"]) == (400, why)
    assert served.ask("/v1/unload_lora_adapter", {"lora_name": "none"})[0] == 404
    assert served.ask("/v1/unload_lora_adapter", {"lora_name": "again"})[0] == 200
    assert served.ask("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": "two"})[0] == 200


def test_a_new_version_of_the_bundle_has_the_adapters_of_the_one_before(served: Served) -> None:
    assert served.ask("/v1/unload_lora_adapter", {"lora_name": "one"})[0] == 200
    path = served.built.path
    new_bundle = Path(shutil.copytree(path, path.with_name("made")))
    path.rename(path.with_name("before"))
    new_bundle.rename(path)
    assert served.process.stderr is not None and served.process.stderr.readline().startswith("serving Tiny")
    assert served.complete("two", text(20)) == expected(served, "two", text(20))
    assert [model["id"] for model in served.ask("/v1/models")[1]["data"]] == ["Tiny", "two"]


def test_more_adapters_than_places_end_the_start(served: Served) -> None:
    process = served.start("one", "two", "--adapter", f"three={served.folders['one']}")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode and "adapter 'three': the bundle holds 2 at a time (cgcompile build --adapters N)" in stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--adapter", "sql"], "--adapter sql: expected a name and a folder, as in sql=adapters/sql"),
        (["one", "one"], "another adapter has this name"), (["--adapter", "Tiny=x"], "adapter 'Tiny': the name is taken"),
        (["--adapter", "x=/none"], "/none/adapter_config.json: No such file or directory; expected the folder of an adapter"),
        (["--adapter-root", "/none"], "--adapter-root /none: no such folder"),
    ],
)  # fmt: skip
def test_what_ends_the_start(served: Served, options: list[str], why: str) -> None:
    process = served.start(*options)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode and why in stderr, stderr


def test_a_bundle_without_a_bank(served: Served) -> None:
    from cgserve.language.adapters import AdapterError
    from tests.helpers.scripted_server import running

    with (
        running(served.built.path.parent / "Tiny") as server,
        pytest.raises(AdapterError, match="the bundle has no bank of adapters"),
    ):
        asyncio.run(server.served.load_adapter("one", served.folders["one"]))
