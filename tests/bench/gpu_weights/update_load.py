"""Replaces weights while four sessions are called: `update_load.py BUNDLE [SECONDS]`, with a CUDA bundle of floating-point weights.

Two files with random weights are written, with the names and shapes of the bundle's weights. Each of four threads calls its own
session with CPU inputs and compares every answer, bit for bit, with the answers of both files. Meanwhile the program is updated
with the two files alternately. Prints the number of answers of each file and of neither (must be 0), the time of updates, and the
time of calls with and without updates. Then a truncated file and a file with a wrong shape must be rejected without any effect.
Needs NumPy, but no torch.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy

import cgbundle
from cgbundle.errors import CgbundleError
from cgbundle.format import archive, file_names, safetensors_files
from cgbundle.tensors import tensor

SESSIONS = 4

SMALL = {
    "bfloat16": (numpy.uint16, 0x807F, 0x3C80),
    "float16": (numpy.uint16, 0x83FF, 0x2400),
    "float32": (numpy.uint32, 0x807FFFFF, 0x3C800000),
}
"""By dtype: the word type, the mask of the random bits (sign and fraction), and the fixed exponent bits, for numbers near 0.02."""


def main(bundle: str, seconds: str = "4") -> int:
    """Returns 1 if an answer belongs to neither file, or if a rejected file changed something."""
    with tempfile.TemporaryDirectory() as folder, cgbundle.load(bundle) as program:
        files = [write(bundle, Path(folder) / f"{number}.safetensors", number) for number in range(2)]
        keys = program.int_keys
        inputs = [draw(program, key) for key in keys]
        expected: list[list[bytes]] = []
        for file in files:
            program.update(file)
            expected.append([answer(program, values) for values in inputs])
        fine = all(len(set(answers)) == len(files) for answers in zip(*expected, strict=True))
        print(f"{Path(files[0]).stat().st_size / 1e6:.0f} MB of weights; answers of both files differ: {fine}")
        alone, _ = load(program, inputs, expected, float(seconds) / 2, [])
        during, took = load(program, inputs, expected, float(seconds), files)
        for name, sessions in (("without updates", alone), (f"beside {len(took)} updates", during)):
            times = sorted(1e3 * duration for calls in sessions for duration, _ in calls)
            counts = [sum(by == number for calls in sessions for _, by in calls) for number in (0, 1, -1)]
            fine = fine and not counts[2]
            print(
                f"{name}: {len(times)} calls of {SESSIONS} sessions, by the one {counts[0]}, by the other {counts[1]}, by neither"
                f" {counts[2]}; a call {statistics.median(times):.2f} ms, the longest {times[-1]:.1f}"
            )
        print(f"an update {1e3 * statistics.median(took):.0f} ms ({1e3 * min(took):.0f} to {1e3 * max(took):.0f})")
        program.update(files[0])
        for file in (truncated(files[1]), misshapen(files[1])):
            try:
                program.update(file)
                fine = False
                print(f"{file}: NOT REFUSED")
            except CgbundleError as refusal:
                same = [answer(program, values) for values in inputs] == expected[0]
                fine = fine and same
                print(f"refused: {refusal} ({'nothing changed' if same else 'SOMETHING CHANGED'})"[:200])
    return 0 if fine else 1


def load(
    program: Any, inputs: list[Any], expected: list[list[bytes]], seconds: float, files: list[str]
) -> tuple[list[list[tuple[float, int]]], list[float]]:
    """Returns, by session, the seconds of every call and the file whose weights it used; also the seconds of every update."""
    calls: list[list[tuple[float, int]]] = [[] for _ in range(SESSIONS)]
    done, ready = threading.Event(), threading.Barrier(SESSIONS + 1)

    def call(place: int) -> None:
        with program.session() as session:
            ready.wait()
            number = place
            while not done.is_set():
                number = (number + 1) % len(inputs)
                begun = time.perf_counter()
                got = answer(session, inputs[number])
                spent = time.perf_counter() - begun
                by = next((index for index, answers in enumerate(expected) if answers[number] == got), -1)
                calls[place].append((spent, by))

    threads = [threading.Thread(target=call, args=(place,)) for place in range(SESSIONS)]
    for thread in threads:
        thread.start()
    ready.wait()
    took: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if files:
            begun = time.perf_counter()
            program.update(files[len(took) % 2])
            took.append(time.perf_counter() - begun)
        time.sleep(0.02)
    done.set()
    for thread in threads:
        thread.join()
    return calls, took


def answer(program: Any, values: list[Any]) -> bytes:
    outputs = program.replay(values)
    return bytes((outputs[0] if isinstance(outputs, (list, tuple)) else outputs).tobytes())


def draw(program: Any, key: tuple[int, ...]) -> list[Any]:
    """Returns CPU inputs for a key: indices below 1000, or numbers near 0.02."""
    row = program.spec.programs[program.int_keys.index(key)]
    random, tensors = numpy.random.default_rng(sum(key)), []
    for value in [row.values[index] for index in row.inputs]:
        if value.dtype in SMALL:
            data = small(random, value.dtype, math.prod(value.shape))
        else:
            data = random.integers(0, 1000, value.shape, value.dtype).tobytes()
        tensors.append(tensor.from_bytes(data, value.dtype, value.shape))
    return tensors


def write(bundle: str, path: Path, seed: int) -> str:
    """Writes random weights under the bundle's names; frozen weights keep their values."""
    random, manifest = numpy.random.default_rng(seed), archive.read_manifest(bundle)
    frozen = {manifest.weights[row.weight].tensor for row in manifest.frozen}
    mapped = safetensors_files.Mapped(str(Path(bundle) / file_names.WEIGHTS), file_names.WEIGHTS)
    tensors: dict[str, safetensors_files.Tensor] = {}
    for name, entry in mapped.entries.items():
        data = bytes(mapped.data(name))
        if entry.dtype in SMALL and name not in frozen:
            data = small(random, entry.dtype, math.prod(entry.shape))
        tensors[name] = (entry.dtype, entry.shape, partial(bytes, data))
    mapped.close()
    with open(path, "wb") as file:
        safetensors_files.write(file, tensors)
    return str(path)


def small(random: numpy.random.Generator, dtype: str, number: int) -> bytes:
    """Returns random numbers near 0.02 of either sign."""
    words, free, fixed = SMALL[dtype]
    return ((random.integers(0, numpy.iinfo(words).max, number, words) & free) | fixed).astype(words).tobytes()


def truncated(file: str) -> str:
    """Writes a copy without its last 64 bytes."""
    copy = Path(f"{file}.truncated.safetensors")
    copy.write_bytes(Path(file).read_bytes()[:-64])
    return str(copy)


def misshapen(file: str) -> str:
    """Writes a copy in which one tensor has another shape."""
    mapped = safetensors_files.Mapped(file, file_names.WEIGHTS)
    tensors: dict[str, safetensors_files.Tensor] = {}
    for name, entry in mapped.entries.items():
        tensors[name] = (entry.dtype, entry.shape, partial(bytes, bytes(mapped.data(name))))
    mapped.close()
    last = list(tensors)[-1]
    dtype, shape, data = tensors[last]
    tensors[last] = (dtype, (*shape, 1), data)
    copy = Path(f"{file}.misshapen.safetensors")
    with open(copy, "wb") as out:
        safetensors_files.write(out, tensors)
    return str(copy)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
