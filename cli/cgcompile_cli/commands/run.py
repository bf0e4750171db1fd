"""`cgcompile run`: runs one replay of a bundle, without NumPy or torch."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..options import BundlePath, Threads, check_writable, recorded_keys
from ..output import duration, listed, safe, say, show, table, write_json

if TYPE_CHECKING:
    from cgbundle import Program
    from cgbundle.format.schema import EntrySpec, IntKey
    from cgbundle.tensors.tensor import Tensor

VALUES = 4
"""Maximum elements of an output that are shown."""

OTHER_SIZES = "inputs of another size: --inputs FILE; they are padded or chunked where the build proved that this is exact"
"""The hint for a size without stored inputs."""

STDOUT = "-"
"""The file name for standard output."""


def run(
    bundle: BundlePath,
    inputs: Annotated[
        str | None,
        typer.Option("--inputs", metavar="FILE", help="A safetensors file with inputs by name. Default: those of the self-test."),
    ] = None,
    outputs: Annotated[
        str | None,
        typer.Option(
            "--outputs", metavar="FILE", help="Write the outputs and changed inputs to this safetensors file; - is stdout."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--size",
            metavar="KEY",
            help="The int_key of the stored inputs: 8, or batch=8,seq=128. Default: the smallest.",
            autocompletion=recorded_keys,
        ),
    ] = None,
    entry: Annotated[
        str, typer.Option("--entry", metavar="NAME", help="The entry, if there are several. Default: forward, or the first one.")
    ] = "",
    repeat: Annotated[
        int | None,
        typer.Option("--repeat", min=1, metavar="N", help="Replay N more times, warm, and show the times."),
    ] = None,
    threads: Threads = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show the time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Replay a bundle and show its outputs.

    Without --inputs it replays the inputs of the self-test. Inputs of
    other sizes are padded or chunked, if the build proved that this is
    exact. Inputs that the model changes are shown too. Constants of the
    call (`cgcompile inspect` shows them) have their recorded values.

    --repeat times more replays of the same inputs and state, with the
    copies of inputs and outputs; `cgcompile bench` compares with PyTorch.

    \b
    cgcompile run gpt.cgb --size 8
    cgcompile run gpt.cgb --repeat 100
    cgcompile run gpt.cgb --inputs in.safetensors --outputs out.safetensors
    """
    import cgbundle
    from cgbundle.format.file_names import entry_named
    from cgbundle.validate.bundle import checked_manifest
    from cgcompile.bundle.arguments import constants

    from ..int_keys import spell
    from ..summary import cut

    if inputs is not None and key is not None:
        raise UsageError("--size selects among the stored inputs: it cannot be used with --inputs")
    if outputs is not None:
        _check_outputs(outputs, as_json)
    spec = entry_named(checked_manifest(bundle), entry)
    chosen = _chosen(spec, key)
    input_tensors = _stored(bundle, spec, chosen) if inputs is None else _read(inputs, spec)
    begin = time.perf_counter()
    with cgbundle.load(bundle, threads=threads) as program:
        loaded = time.perf_counter()
        fresh_inputs = _inputs_again(spec, input_tensors)
        callable_entry = program[spec.name]
        replay_start = time.perf_counter()
        output_tensors: list[Tensor] = callable_entry.replay(input_tensors)
        replayed = time.perf_counter()
        warm = _repeated(program, spec.name, fresh_inputs, repeat or 0)
    named_tensors = _tensors_by_name(spec, input_tensors, output_tensors)
    rows = [_row(name, value) | {"values": preview(value)} for name, value in named_tensors]
    if outputs is not None:
        _write(outputs, named_tensors)
    seconds: dict[str, Any] = {
        "load": loaded - begin,
        "replay": replayed - replay_start,
        **({"repeated": _statistics(warm)} if warm else {}),
    }
    if as_json:
        write_json({
            "inputs": [_row(row.name, value) for row, value in zip(spec.inputs, input_tensors, strict=True)],
            "outputs": list(map(_plain, rows[: len(output_tensors)])),
            "written": list(map(_plain, rows[len(output_tensors) :])),
            "constants": [constant._asdict() for constant in constants(spec)],
            "seconds": seconds,
        })  # fmt: skip
        return
    ellipses = [", ..." if math.prod(row["shape"]) > len(row["values"]) else "" for row in rows]
    shown = [
        (row["name"], row["dtype"], row["shape"], listed([_spelled(value) for value in row["values"]]) + dots)
        for row, dots in zip(rows, ellipses, strict=True)
    ]
    text = sys.stderr if outputs == STDOUT else sys.stdout
    show(table(("output", "dtype", "shape", "values"), shown), text)
    if warm:
        show("", text)
        stats = _statistics(warm)
        show(table((">replays", *[f">{name}" for name in stats][1:]), [(repeat, *map(duration, list(stats.values())[1:]))]), text)
    if not quiet:
        if fixed := constants(spec):
            say(safe(f"constants: {', '.join([f'{constant.name}={cut(repr(constant.value))}' for constant in fixed])}"))
        say(f"loaded in {duration(seconds['load'])}, the first call took {duration(seconds['replay'])}")
        if inputs is None:
            at = f" at int_key {spell(chosen)} (others: --size)" if chosen else ""
            say(f"inputs: those of the self-test{at}; for your own: --inputs FILE")


def _inputs_again(entry: EntrySpec, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
    """Returns a function that returns the current inputs again, with copies of those that a replay writes to."""
    copies = {index: tensors[index].clone() for index in entry.mutated_inputs}
    return lambda: [copies[index].clone() if index in copies else value for index, value in enumerate(tensors)]


def _repeated(program: Program, entry: str, inputs: Callable[[], list[Tensor]], times: int) -> list[float]:
    """Returns the seconds of `times` replays with the same inputs and state."""
    seconds, callable_entry = [], program[entry]
    for _ in range(times):
        program.reset()
        tensors = inputs()
        start = time.perf_counter()
        callable_entry.replay(tensors)
        seconds.append(time.perf_counter() - start)
    return seconds


def _statistics(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the number of replays, minimum, percentiles (nearest rank), maximum and mean."""
    ranked = sorted(seconds)
    percentiles = {f"p{share}": ranked[math.ceil(share * len(ranked) / 100) - 1] for share in (50, 90, 99)}
    return {
        "replays": len(ranked), "min": ranked[0], **percentiles, "max": ranked[-1], "mean": math.fsum(ranked) / len(ranked),
    }  # fmt: skip


def _tensors_by_name(entry: EntrySpec, input_tensors: list[Tensor], output_tensors: list[Tensor]) -> list[tuple[str, Tensor]]:
    """Returns outputs and mutated inputs with unique names.  A mutated input has the input's name, or `NAME.written` if an output
    has that name."""
    tensors = {spec.name: value for spec, value in zip(entry.outputs, output_tensors, strict=True)}
    for index in entry.mutated_inputs:
        name = entry.inputs[index].name
        while name in tensors:
            name += ".written"
        tensors[name] = input_tensors[index]
    return list(tensors.items())


def _row(name: str, value: Tensor) -> dict[str, Any]:
    return {"name": name, "dtype": value.dtype, "shape": list(value.shape)}


def preview(value: Tensor) -> list[complex | float | int | bool]:
    """Returns the first elements along the last axis; [] for a dtype without numbers."""
    from cgbundle.tensors.numbers import decode

    last = len(value.shape) - 1
    first = value[tuple([slice(0, VALUES if axis == last else 1) for axis in range(last + 1)])]
    try:
        numbers = decode(value.dtype, first.tobytes())
    except TypeError:
        return []
    short = [float(f"{number:.6g}") if isinstance(number, float) else number for number in numbers]
    return list(map(complex, short[::2], short[1::2])) if value.dtype.startswith("complex") else short


def _spelled(number: complex | float | int | bool) -> str:
    """Formats a number: `1.5`, `1.5-2j`."""
    return str(number).strip("()")


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Converts a row to JSON: a complex number becomes a list of two parts, and infinity and NaN become text."""
    parts = [(value.real, value.imag) if isinstance(value, complex) else (value,) for value in row["values"]]
    finite = [[part if math.isfinite(part) else str(part) for part in components] for components in parts]
    return row | {"values": [components if len(components) > 1 else components[0] for components in finite]}


def _chosen(entry: EntrySpec, key: str | None) -> IntKey:
    """Returns the int_key whose inputs are stored: that of --size, else the smallest.  Raises UsageError."""
    from cgbundle.errors import CallError

    from ..int_keys import parse

    if key is None:
        return min(program.key for program in entry.programs)
    try:
        return parse(entry, key)
    except CallError as error:
        raise UsageError(f"--size selects among the stored inputs: {error}", OTHER_SIZES) from None


def _stored(path: str, entry: EntrySpec, chosen: IntKey) -> list[Tensor]:
    """Returns the inputs of the self-test at an int_key."""
    from cgbundle import self_test
    from cgbundle.format.archive import Archive
    from cgbundle.format.file_names import SELF_TEST
    from cgbundle.validate.bundle import check_self_test

    bundle = Archive(path)
    check_self_test(bundle)
    with closing(bundle.mapped(SELF_TEST)) as stored:
        return self_test.inputs_of(stored, entry, chosen)


def _read(path: str, entry: EntrySpec) -> list[Tensor]:
    """Reads the inputs by name.  Raises UsageError for a file that is not safetensors, lacks an input, or has other tensors."""
    from cgbundle.errors import BundleError
    from cgbundle.format.safetensors_files import Mapped
    from cgbundle.tensors.tensor import from_bytes

    input_names = [spec.name for spec in entry.inputs]
    try:
        file = Mapped(path, path)
    except BundleError as error:
        raise UsageError(str(error), "--inputs takes a safetensors file that holds every input under its name") from None
    with closing(file):
        takes = f"the bundle takes {listed(input_names)}"
        for name in [*input_names, *file.entries]:
            if name not in file.entries:
                raise UsageError(f"{path}: no tensor {name!r}; it holds {listed(list(file.entries))}", takes)
            if name not in input_names:
                raise UsageError(f"{path}: the bundle has no input {name!r}", takes)
        return [from_bytes(file.data(name), file.entries[name].dtype, file.entries[name].shape) for name in input_names]


def _check_outputs(path: str, as_json: bool) -> None:
    """Raises UsageError before the replay if outputs cannot be written to `path`."""
    if path != STDOUT:
        check_writable(path)
    elif as_json:
        raise UsageError("--outputs - and --json both write to stdout", "give --outputs a file")
    elif sys.stdout.isatty():
        raise UsageError("--outputs -: stdout is a terminal, and safetensors files are binary", "redirect it: > out.safetensors")


def _write(path: str, named_tensors: list[tuple[str, Tensor]]) -> None:
    from cgbundle.format.safetensors_files import write

    tensors = {name: (value.dtype, value.shape, value.tobytes) for name, value in named_tensors}
    if path == STDOUT:
        sys.stdout.flush()
        write(sys.stdout.buffer, tensors)
        sys.stdout.buffer.flush()
        return
    with open(path, "wb") as file:
        write(file, tensors)
