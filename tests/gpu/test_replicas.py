"""Replicas of a bundle, called as one program, equal a single program. Needs two GPUs of a golden bundle's architecture."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cgbundle.format.file_names import self_test_entry
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("fewer than two GPUs", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the golden bundles are for sm_90", allow_module_level=True)

import cgbundle  # noqa: E402

PATH = GOLDEN / "v1/gpt_two.cgb"


@pytest.fixture(scope="module")
def replicas() -> Iterator[cgbundle.Replicas]:
    with cgbundle.load(PATH, devices=[0, 1], replicas=True) as loaded:
        yield loaded


def self_test(program: cgbundle.Program, key: tuple[int, ...], kind: str) -> Any:
    """Returns the first self-test tensor of a kind, as a CPU torch tensor."""
    opened = program.open_self_test()
    try:
        name = self_test_entry(key, kind, 0)
        entry = opened.entries[name]
        raw = torch.frombuffer(bytearray(opened.data(name)), dtype=getattr(torch, entry.dtype))
        return raw.reshape(entry.shape)
    finally:
        opened.close()


def test_inputs_of_a_gpu_are_served_there(replicas: cgbundle.Replicas) -> None:
    for key in replicas.int_keys:
        sample, wanted = [self_test(replicas.programs[0], key, kind) for kind in ("input", "output")]
        for device in (1, 0, 1):
            output = replicas(sample.to(f"cuda:{device}"))
            assert output.device.index == device
            assert torch.equal(output.cpu(), wanted)


def test_threads_with_inputs_of_the_cpu_keep_both_devices_busy(replicas: cgbundle.Replicas) -> None:
    key = replicas.int_keys[-1]
    sample, wanted = [self_test(replicas.programs[0], key, kind) for kind in ("input", "output")]
    wrong: list[Any] = []

    def serve() -> None:
        for _ in range(200):
            output = replicas(sample)
            if not torch.equal(output, wanted):
                wrong.append(output)

    threads = [threading.Thread(target=serve) for _ in range(6)]
    with replicas.programs[0].profile() as first, replicas.programs[1].profile() as second:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    calls = [max(row.times for row in profile.rows()) for profile in (first, second)]
    assert min(calls) > 300, calls


def test_a_third_device_is_refused(replicas: cgbundle.Replicas) -> None:
    with raises("wrong-machine", match="device 99"):
        cgbundle.load(PATH, devices=[0, 99], replicas=True)
