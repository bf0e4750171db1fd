"""The models of the build table, with their sizes and levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.bench.common import children

LEVELS = ("eager", "inductor", "max-autotune")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """`source` is a model file. If it is "", `name` is a case of tests/gpu/helpers/models.py or of architectures.py."""

    name: str
    title: str
    sizes: dict[str, list[int]]
    source: str = ""
    levels: tuple[str, ...] = LEVELS
    environment: dict[str, str] = field(default_factory=dict)


def example(name: str) -> str:
    """Returns the path of a model file of examples/."""
    return str(children.ROOT / "examples" / f"{name}.py")


GPT = Model(
    name="gpt",
    title="GPT, 12 layers, bf16",
    source=example("gpt"),
    sizes={"batch": [1, 8, 32]},
    environment={"GPT_DTYPE": "bfloat16"},
)
MLP = Model(name="mlp", title="MLP, fp32", source=example("mlp"), sizes={"batch": [1, 8]})
RESNET = Model(
    name="resnet",
    title="ResNet-50, fp16, channels last",
    source=example("resnet"),
    sizes={"batch": [1, 8]},
    environment={"RESNET_DTYPE": "float16", "RESNET_LAYOUT": "channels_last"},
)
MINILM = Model(name="minilm", title="MiniLM, two dimensions", source=example("minilm"), sizes={"batch": [1, 8], "seq": [32, 128]})
LSTM = Model(name="lstm", title="LSTM, two layers", sizes={"batch": [2, 8]}, levels=LEVELS[:2])
FFT = Model(name="fft", title="torch.fft filter", sizes={"batch": [2, 8]}, levels=LEVELS[:2])
MODELS = (GPT, RESNET, MINILM, MLP, LSTM, FFT)

ARCHITECTURES = tuple(
    [
        Model(name=name, title=name, sizes={"batch": [1, 4]}, levels=LEVELS[:2])
        for name in ("BERT", "GPT-2", "Llama", "Mamba", "ViT", "Swin", "T5 encoder", "Whisper encoder")
    ]
)
BY_NAME = {model.name: model for model in (*MODELS, *ARCHITECTURES)}


def make_model(model: Model) -> Sequence[Any]:
    """Returns (model, inputs) as `cgcompile.build` takes them. Imports torch only if the model is not a file."""
    if model.source:
        return model.source, None
    import torch

    if model in ARCHITECTURES:
        from tests.bench.builds import architectures

        return architectures.make(model.name)

    from tests.gpu.helpers.models import CASES

    case = CASES[model.name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = case.model()

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return case.inputs(batch)

    return network.eval(), inputs
