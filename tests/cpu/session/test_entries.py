"""The golden bundle with several entries: calls in any order and session equal eager PyTorch."""

from __future__ import annotations

import random

import pytest
import torch

import cgbundle
from cgbundle.errors import MachineError
from cgbundle.format import archive, file_names
from cgbundle.format.safetensors_files import Mapped
from cgbundle.format.shapes import span
from tests.golden.models import Lanes
from tests.helpers.models.entry_models import check_calls, lanes
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises

BUNDLE = GOLDEN / "v1/cpu_entries.cgb"


@pytest.fixture
def program() -> cgbundle.Program:
    try:
        return cgbundle.load(BUNDLE)
    except MachineError as error:
        pytest.skip(str(error))


def eager() -> Lanes:
    model = Lanes()
    stored = Mapped(str(BUNDLE / file_names.WEIGHTS), file_names.WEIGHTS)
    for name, tensor in model.state_dict().items():
        if name not in stored.entries:  # state of zeros is not stored
            tensor.zero_()
            continue
        tensor.copy_(torch.frombuffer(bytearray(stored.data(name)), dtype=tensor.dtype).reshape(tensor.shape))
    stored.close()
    return model


def check(program: cgbundle.Program, model: Lanes, count: int, seed: int) -> None:
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(count):
        name = drawn.choice(["forward", "fill"])
        lane = torch.tensor([drawn.randrange(4)])
        tensors = {
            "forward": (torch.randn(drawn.randrange(1, 10), 16, generator=generator),),
            "fill": (torch.randn(2, 16, generator=generator), lane),
        }[name]
        with torch.no_grad():
            expected = getattr(model, name)(*tensors)
        assert torch.allclose(program[name](*tensors), expected, rtol=1e-4, atol=1e-4), name
    assert torch.allclose(torch.from_dlpack(program.state["cache"]), model.cache, rtol=1e-4, atol=1e-4)


def test_calls_in_any_order_are_eager_pytorchs(program: cgbundle.Program) -> None:
    with program:
        check(program, eager(), 1000, 0)


def test_a_session_has_a_state_of_its_own_for_all_entries(program: cgbundle.Program) -> None:
    with program, program.session() as other:
        check(other, eager(), 50, 1)
        check(program, eager(), 50, 2)


def test_one_copy_of_the_weights_and_the_memory_that_is_told(program: cgbundle.Program) -> None:
    with program:
        stored = archive.Archive(str(BUNDLE)).tensors(file_names.WEIGHTS)
        weights = {name: entry.end - entry.begin for name, entry in stored.items()}
        assert sorted(name for name in weights if not name.startswith("lifted")) == ["linear.bias", "linear.weight"]
        (cache,) = [weight for weight in program.manifest.weights if weight.name == "cache"]
        assert cache.zeros and program.memory["state"] == span(cache)
        assert program.memory["weights"] == sum(weights.values())


def test_only_who_changes_the_state_says_so(program: cgbundle.Program) -> None:
    with program:
        names = [weight.name for weight in program.manifest.weights]
        changes = {entry.name: [names[index] for index in entry.mutated_buffers] for entry in program.manifest.entries}
        assert changes == {"forward": [], "fill": ["cache"]}
        with raises("key-missing", match="fill\\(\\) writes to its buffer 'cache'"):
            program.fill(torch.zeros(1, 16), torch.tensor([0]))


def test_buffers_of_an_entry(program: cgbundle.Program) -> None:
    with program:
        x, lane = program.fill.buffers((2,))
        assert x.shape == (2, 16) and lane.shape == (1,)
        torch.from_dlpack(x).fill_(1.0)
        torch.from_dlpack(lane).fill_(3)
        model = eager()
        with torch.no_grad():
            expected = model.fill(torch.ones(2, 16), torch.tensor([3]))
        got = program.fill(torch.from_dlpack(x), torch.from_dlpack(lane))
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


LANES = GOLDEN / "v1/cpu_lanes.cgb"


@pytest.fixture
def decoder() -> cgbundle.Program:
    """Loads a bundle with prefill at lengths 64 and 256, decode at batch sizes 1 and 8, and a method that only writes."""
    try:
        return cgbundle.load(LANES)
    except MachineError as error:
        pytest.skip(str(error))


def test_a_thousand_calls_of_prefill_decode_and_reset_lane(decoder: cgbundle.Program) -> None:
    keys = {entry.name: [program.key for program in entry.programs] for entry in decoder.manifest.entries}
    assert keys == {"prefill": [(64,), (256,)], "decode": [(1,), (8,)], "reset_lane": [()]}
    with decoder:
        assert check_calls(decoder, lanes(), "cpu", 1000) <= 1e-4


def test_a_method_that_gives_no_tensor(decoder: cgbundle.Program) -> None:
    with decoder, decoder.session() as other:
        for program in (decoder, other):
            program.decode(torch.zeros(8, dtype=torch.int64))
            assert program.reset_lane(torch.tensor([3])) is None
            assert program.state["length"].tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
        assert decoder.reset_lane.outputs == () and other["reset_lane"].warmup() is None
        assert other.state["length"].tolist() == [1, 1, 1, 0, 1, 1, 1, 1]


def test_one_set_of_weights_one_state_and_what_is_printed_of_them(decoder: cgbundle.Program) -> None:
    with decoder:
        stored = archive.Archive(str(LANES)).tensors(file_names.WEIGHTS)
        bytes_of = {name: entry.end - entry.begin for name, entry in stored.items()}
        state = {"keys", "values", "length"}
        assert {name for name in bytes_of if not name.startswith(("lifted", "cgcompile."))} == {
            "head.weight", "mixed.weight", "mixed.bias",
        }, "state of zeros stands in no file"  # fmt: skip
        assert decoder.memory["weights"] == sum(size for name, size in bytes_of.items() if name not in state)
        kept = [weight for weight in decoder.manifest.weights if weight.name in state]
        assert decoder.memory["state"] == max(weight.offset + span(weight) for weight in kept)
        assert set(decoder.memory) == {"weights", "state"}
