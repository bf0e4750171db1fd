"""`warmup` and `profile` of CPU programs.  The tests load golden bundles, and build nothing."""

from __future__ import annotations

import gc
import json
import os
from array import array
from pathlib import Path

import pytest

import cgbundle
from cgbundle.call.profile import CALL
from cgbundle.tensors.tensor import from_bytes
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises

pytest.importorskip("torch")
STATEFUL, PLAIN = GOLDEN / "v1/cpu_state.cgb", GOLDEN / "v1/cpu_mlp.cgb"


@pytest.fixture(autouse=True)
def _skip_if_goldens_cannot_load() -> None:
    try:
        cgbundle.load(STATEFUL).close()
    except cgbundle.CgbundleError as error:
        pytest.skip(str(error))


def ones_input(program: cgbundle.Program, key: tuple[int, ...]) -> cgbundle.Tensor:
    """Returns an input of ones."""
    (spec,) = program.inputs
    shape = [key[0] if size == program.manifest.entries[0].dimensions[0].name else int(str(size)) for size in spec.shape]
    count = 1
    for size in shape:
        count *= size
    return from_bytes(array("f", [1.0] * count), spec.dtype, shape)


def flat(result: object) -> list[object]:
    values = result.values() if isinstance(result, dict) else result if isinstance(result, tuple | list) else [result]
    return [(value.clone() if isinstance(value, cgbundle.View) else value).tolist() for value in values]


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_warmup_changes_no_results_and_no_state(outputs: str) -> None:
    """State, random numbers and later results equal those of a program that was not warmed up."""
    with cgbundle.load(STATEFUL) as fresh, cgbundle.load(STATEFUL, outputs=outputs) as warm:
        for program in (fresh, warm):
            if program.manifest.random is not None:
                program.seed(7)
            program(ones_input(program, program.int_keys[0]))
        before = {name: warm.state[name].tolist() for name in warm.state}
        warm.warmup()
        assert before and {name: warm.state[name].tolist() for name in warm.state} == before
        for key in fresh.int_keys:
            assert str(flat(warm(ones_input(warm, key)))) == str(flat(fresh(ones_input(fresh, key))))


def test_warmup_calls_only_the_named_int_keys() -> None:
    with cgbundle.load(PLAIN) as program:
        first, second = program.int_keys[:2]
        with program.profile() as profile:
            program.warmup(second)
            program.warmup(first, second)
        batch = program.manifest.entries[0].dimensions[0].name
        names = [span.name for span in profile.spans]
        assert [name.partition("[")[2] for name in names] == [f"{batch}={key[0]}]" for key in (second, first, second)]
        with raises("key-missing"):
            program.warmup((12345,))


def test_warmup_works_without_the_files_and_fails_after_close(tmp_path: Path) -> None:
    import shutil

    path = Path(shutil.copytree(PLAIN, tmp_path / "gone.cgb"))
    program = cgbundle.load(path)
    session = program.session()
    shutil.rmtree(path)
    program.warmup()
    session.warmup()
    program.close()
    for closed in (program, session):
        with raises("program-closed"):
            closed.warmup()


def test_no_descriptor_is_left_open() -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    cgbundle.load(PLAIN).close()
    gc.collect()  # frees objects of earlier tests in reference cycles
    before = opened()
    program = cgbundle.load(PLAIN)
    program.warmup()
    program.close()
    assert opened() == before


def test_calls_and_steps_are_timed(tmp_path: Path) -> None:
    with cgbundle.load(PLAIN) as program:
        x = ones_input(program, program.int_keys[0])
        before = flat(program(x))
        with program.profile() as profile:
            assert flat(program(x)) == before
            program(x)
            with raises("input-kind"):
                program(3)
        program(x)  # after the profile has ended: not timed
        call, step = profile.rows()
        assert (call.name, call.track, call.times, step.track, step.times) == (CALL, "CPU", 2, "CPU", 2)
        assert 0 < step.least <= step.most and step.seconds < call.seconds
        for span in profile.spans:
            assert span.start < span.end
        header, *lines = str(profile).splitlines()
        assert header.split()[-1] == "ms" and [line.split()[0] for line in lines] == ["call", "host"]
        profile.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert sorted(event["name"] for event in complete) == sorted(span.name for span in profile.spans)
    assert min(event["ts"] for event in complete) == 0 and all(event["dur"] > 0 and event["pid"] == 1 for event in complete)
    assert {event["tid"] for event in complete} <= {event["tid"] for event in events if event["name"] == "thread_name"}


def test_a_program_may_be_closed_while_it_is_profiled() -> None:
    with cgbundle.load(PLAIN) as program, program.profile() as profile:
        program(ones_input(program, program.int_keys[0]))
        program.close()
    assert len(profile.spans) == 2
    with raises("program-closed"):
        program.profile().__enter__()


def test_a_profile_without_calls_prints_no_call(tmp_path: Path) -> None:
    with cgbundle.load(PLAIN) as program, program.profile() as profile:
        pass
    assert str(profile).startswith("no call of ")
    profile.save(tmp_path / "empty.json")
    assert [event["ph"] for event in json.loads((tmp_path / "empty.json").read_text())["traceEvents"]] == ["M"]
