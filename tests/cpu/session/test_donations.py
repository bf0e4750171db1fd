"""The golden bundle with donations on a CPU: calls in random order, with donated outputs, equal eager PyTorch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cgbundle
from cgbundle import self_test
from cgbundle.errors import MachineError
from cgbundle.format import file_names
from cgbundle.format.safetensors_files import Mapped
from tests.golden.models import Recurrent
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises

BUNDLE = GOLDEN / "v1/cpu_chains.cgb"


@pytest.fixture
def program() -> Iterator[cgbundle.Program]:
    try:
        loaded_program = cgbundle.load(BUNDLE, outputs="view")
    except MachineError as error:
        pytest.skip(str(error))
    with loaded_program:
        yield loaded_program


@pytest.fixture(scope="module")
def model() -> Recurrent:
    recurrent = Recurrent()
    stored = Mapped(str(BUNDLE / file_names.WEIGHTS), file_names.WEIGHTS)
    for name, tensor in recurrent.state_dict().items():
        tensor.copy_(torch.frombuffer(bytearray(stored.data(name)), dtype=tensor.dtype).reshape(tensor.shape))
    stored.close()
    return recurrent


def close(got: Any, expected: torch.Tensor) -> None:
    got = got.tensor if isinstance(got, cgbundle.View) else got
    assert torch.allclose(torch.as_tensor(got), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_calls_in_random_order(program: cgbundle.Program, model: Recurrent, library: str) -> None:
    drawn = random.Random(0)

    def argument(tensor: torch.Tensor) -> Any:
        return tensor.numpy() if library == "numpy" else tensor

    known: dict[str, tuple[Any, torch.Tensor]] = {}
    with torch.no_grad():
        for _ in range(300):
            x = torch.randn(drawn.choice([3, 4, 4]), 16)
            if not known or drawn.random() < 0.4:
                known["encode"] = program.encode(argument(x)), model.encode(x)
            else:
                passed, expected = known[drawn.choice(list(known))]
                x = torch.randn(len(expected), 16)
                taken = argument(passed.tensor.clone()) if library == "torch" and drawn.random() < 0.3 else passed
                (hidden, total), (wanted, sums) = program.step(taken, argument(x)), model.step(expected, x)
                close(total, sums)
                known["step"] = hidden, wanted
            for hidden, wanted in known.values():
                close(hidden, wanted)  # an output stays valid after a call of the other entry


def test_what_is_taken_is_not_copied(program: cgbundle.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    run = program._backend.run

    def watched(number: int, addresses: list[int], *others: Any) -> Any:
        seen.append(list(addresses))
        return run(number, addresses, *others)

    monkeypatch.setattr(program._backend, "run", watched)
    first = program.encode(torch.randn(4, 16))
    hidden, _ = program.step(first, torch.randn(4, 16))
    program.step(hidden, torch.randn(4, 16))
    assert [addresses[0] for addresses in seen[1:]] == [first.tensor.data_ptr(), hidden._value.data_ptr()]


def test_a_stale_one_raises(program: cgbundle.Program) -> None:
    x = torch.randn(4, 16)
    first = program.encode(x)
    _, loose = program.step(first, x)
    program.step(first, x)
    with raises("stale-view", match="output '1' of call 2 was read after call 3"):
        loose.tensor  # noqa: B018  it is in no donation
    second = program.encode(x)
    with raises("stale-view", match="output 'output' of call 1 of 'encode' was read after call 2 of 'encode'"):
        program.step(first, x)
    program.step(second, x)


def test_the_self_test_compares_chained_calls_with_copies() -> None:
    answer = self_test.fresh(str(BUNDLE))
    if "error" in answer:
        pytest.skip(answer["error"])
    assert [row["title"] for row in answer["donations"]] == ["encode batch=4 -> step batch=4", "step batch=4 -> step batch=4"]
    assert all(row["passed"] for row in (*answer["results"], *answer["donations"])) and not answer["exit_code"]


def test_warmup_by_entry(program: cgbundle.Program) -> None:
    with program.profile() as profile:
        program.step.warmup()
        program.encode.warmup((1,))
        program.warmup()
    assert len(profile.spans) == 1 + 1 + 3
    with raises("entry-missing", match="none is called forward") as caught:
        program.warmup((1,))
    assert caught.value.hint == "call program.encode.warmup(...)"
    with raises("key-missing"):
        program.step.warmup((1,))
