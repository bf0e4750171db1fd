"""bundles/cgserve/language/adapters.py: adapters are read from folders of PEFT, and invalid ones are refused in one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgserve.language.adapters import AdapterError, Bank, bank_of, read_adapter

WIDTHS = {"self_attn.q_proj": (3, 2), "mlp.down_proj": (2, 3)}
"""(in, out) of the layers here."""

CODES = {"F32": "f", "F16": "e"}


def manifest(**shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    """Returns a bundle with a bank of 5 adapters."""
    inputs = [SimpleNamespace(name="adapter", shape=(1,)), SimpleNamespace(name="scale", shape=(1,))]
    inputs += [
        SimpleNamespace(name=f"factors.{name}.{place}", shape=shape)
        for name, pair in shapes.items()
        for place, shape in enumerate(pair)
    ]
    weights = [SimpleNamespace(name=f"adapters.{name}.down", shape=(2, 5, 4, 3)) for name in shapes]
    entries = [SimpleNamespace(name="load_adapter", inputs=inputs)]
    return SimpleNamespace(engine=None, entries=entries, weights=weights)


@pytest.fixture
def bank() -> Bank:
    shapes = {
        f"model.layers.0-1.{name}": ((2, 4, inputs), (2, outputs, 4)) for name, (inputs, outputs) in WIDTHS.items()
    }  # fmt: skip
    adapter_bank = bank_of(manifest(**shapes))
    assert adapter_bank is not None
    return adapter_bank


def test_the_bank_of_a_bundle(bank: Bank) -> None:
    assert (bank.count, bank.rank) == (5, 4)
    assert bank.groups[0].paths == ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]
    later, alone = bank_of(manifest(**{"h.3-4.x.0.y": ((2, 4, 3), (2, 2, 4)), "project_in": ((1, 4, 3), (1, 2, 4))})).groups  # type: ignore[union-attr]
    assert later.paths == ["h.3.x.0.y", "h.4.x.0.y"] and alone.paths == ["project_in"]
    assert bank_of(SimpleNamespace(weights=[SimpleNamespace(name="keys_0")])) is None  # type: ignore[arg-type]


class Written:
    """A folder with an adapter of rank 2, which has factors for both kinds of layers, of layer number 1 only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none", "use_dora": False}
        self.tensors: dict[str, tuple[str, tuple[int, ...], list[float]]] = {}
        for name, (inputs, outputs) in WIDTHS.items():
            layer = f"base_model.model.model.layers.1.{name}"
            self.tensors[f"{layer}.lora_A.weight"] = "F32", (2, inputs), [float(number) for number in range(2 * inputs)]
            self.tensors[f"{layer}.lora_B.weight"] = "F32", (outputs, 2), [-float(number) for number in range(2 * outputs)]

    def write(self) -> Path:
        header, data = {}, b""
        for name, (dtype, shape, values) in self.tensors.items():
            if dtype == "BF16":
                raw = b"".join([struct.pack("<f", value)[2:] for value in values])
            else:
                raw = struct.pack(f"<{len(values)}{CODES[dtype]}", *values)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
            data += raw
        text = json.dumps(header).encode()
        (self.folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        (self.folder / "adapter_config.json").write_text(json.dumps(self.config))
        return self.folder


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_factors_of_a_smaller_rank_are_filled_up_with_zeros(tmp_path: Path, bank: Bank, dtype: str) -> None:
    adapter = Written(tmp_path)
    adapter.tensors = {name: (dtype, shape, values) for name, (_, shape, values) in adapter.tensors.items()}
    read = read_adapter(adapter.write(), bank)
    assert read.scale == 4.0 and list(read.factors) == [group.name for group in bank.groups]
    down, up = read.factors["model.layers.0-1.self_attn.q_proj"]
    zeros = [[0.0] * 3] * 2
    assert down.tolist() == [zeros * 2, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], *zeros]]
    assert up.tolist() == [[[0.0] * 4] * 2, [[0.0, -1.0, 0.0, 0.0], [-2.0, -3.0, 0.0, 0.0]]]
    adapter.config |= {"use_rslora": True, "r": 2, "lora_alpha": 2**0.5}
    assert read_adapter(adapter.write(), bank).scale == pytest.approx(1.0)


LAYER = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 8}, r"rank 8; the bundle takes 4 \(cgcompile build --adapter-rank 8\)"),
        ({"r": 0}, "r: expected a whole number of 1 or more"), ({"r": 1}, r"has the shape \[2, 3\], expected \[1, 3\]"),
        ({"lora_alpha": None}, "lora_alpha: expected a number"),
        ({"peft_type": "IA3"}, "expected peft_type LORA"),
        ({"bias": "all"}, "bias 'all'; adapters with biases are not served"),
        ({"use_dora": True}, "adapters with the option use_dora are not supported"),
        ({"modules_to_save": ["lm_head"]}, "adapters with the option modules_to_save are not supported"),
        ({"rank_pattern": {"q_proj": 1}}, "adapters with the option rank_pattern are not supported"),
        ({"alora_invocation_tokens": [1]}, "adapters with the option alora_invocation_tokens are not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' changes the base model, too; convert it with PEFT first"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(tmp_path: Path, bank: Bank, config: dict[str, Any], message: str) -> None:
    adapter = Written(tmp_path)
    adapter.config |= config
    with pytest.raises(AdapterError, match=message) as caught:
        read_adapter(adapter.write(), bank)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"base_model.model.lm_head.lora_A.weight": ("F32", (2, 3), [0.0] * 6)}, "the bundle has no adapters for lm_head"),
        ({f"{LAYER}.lora_magnitude_vector": ("F32", (2,), [0.0] * 2)}, "lora_magnitude_vector is no factor of a linear layer"),
        ({f"{LAYER}.lora_A.weight": None}, "lora_A.weight is missing, but the other factor of its layer exists"),
        ({f"{LAYER}.lora_B.weight": ("F32", (3, 2), [0.0] * 6)}, r"has the shape \[3, 2\], expected \[2, 2\]"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, bank: Bank, changed: dict[str, Any], message: str) -> None:
    adapter = Written(tmp_path)
    adapter.tensors = {name: tensor for name, tensor in (adapter.tensors | changed).items() if tensor is not None}
    with pytest.raises(AdapterError, match=message) as caught:
        read_adapter(adapter.write(), bank)
    assert "\n" not in str(caught.value)


def test_files_that_are_refused(tmp_path: Path, bank: Bank) -> None:
    with pytest.raises(AdapterError, match="adapter_config.json: No such file or directory; expected the folder of an adapter"):
        read_adapter(tmp_path, bank)
    weights = Written(tmp_path).write() / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(AdapterError, match="adapter_model.safetensors: the file has"):
        read_adapter(tmp_path, bank)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match="its weights are pickled"):
        read_adapter(tmp_path, bank)
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match="no adapter_model.safetensors"):
        read_adapter(tmp_path, bank)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="adapter_config.json: no JSON"):
        read_adapter(tmp_path, bank)


def test_prefixes_are_shared_between_texts_of_one_adapter() -> None:
    """This also holds after another adapter is loaded into the place of the first one."""
    from cgserve.scheduling.requests import NO_ADAPTER, Adapter, Limits, Request, Sampling, Token
    from cgserve.scheduling.scheduler import Scheduler

    limits = Limits(page=4, pages=60, slots=9, blocks=12, readers=(1,), chunk=4, lanes=8, several=True, shared=True)
    scheduler, shared = Scheduler(limits), []
    for key, adapter in enumerate((NO_ADAPTER, Adapter(1, 1), Adapter(1, 1), Adapter(2, 2), NO_ADAPTER, Adapter(1, 3))):
        before = scheduler.shared
        prompt = tuple(range(18))
        scheduler.add(key, Request(prompt=prompt, most=2, sampling=Sampling(temperature=0.0), adapter=adapter))
        while (step := scheduler.next()) is not None:
            assert {lane.adapter for lane in step.lanes} == {adapter.place}
            scheduler.finish([[Token(7, -0.5)] for _ in step.lanes])
        shared.append(scheduler.shared - before)
    assert shared == [0, 0, 16, 0, 16, 0] and scheduler.pages.taken == 0
