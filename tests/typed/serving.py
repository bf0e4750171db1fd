"""A user's script that serves, with every public name of cgbundle."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, assert_type

import cgbundle
import cgcompile
from cgbundle import Record, Tensor, TensorSpec, View


def probabilities(logits: Tensor) -> list[float]:
    """The first row."""
    first: list[float] = logits.tolist()[0]
    return first


def serve(path: str, tokens: Tensor) -> list[float]:
    """Loads, warms up, calls, profiles, and keeps state."""
    with cgbundle.load(
        path, device=0, mode="graph", on_miss="pad", outputs="view", check="full", weights="map", lazy=False, key=None,
        threads=2, cast=True,
    ) as program:  # fmt: skip
        keys: tuple[tuple[int, ...], ...] = program.int_keys
        program.warmup(*keys)
        profile: cgbundle.Profile
        with program.profile() as profile:
            output = program(tokens, temperature=1.0)
        print(profile, profile.rows()[0].seconds, [span.name for span in profile.spans])
        profile.save("trace.json")
        specs: tuple[TensorSpec, ...] = (*program.inputs, *program.outputs)
        for spec in specs:
            print(spec.name, spec.dtype, spec.shape)
        total: int = sum(program.memory.values()) + sum(program.session_memory.values())
        decode: cgbundle.Entry = program.decode
        print([entry.int_keys for entry in program.entries.values()], program["decode"].name, decode(tokens))
        session: cgbundle.Program = program.session()
        session.seed(1)
        session.reset()
        state: cgbundle.State = session.state
        if "cache" in state:
            state["cache"] = state["cache"]
        manifest: cgbundle.Manifest = program.manifest
        (buffer, *_) = program.buffers(keys[0])
        shape: tuple[int, ...] = buffer.shape
        print(total, shape, manifest.name, buffer.tobytes()[:4])
        if isinstance(output, Record):
            output = output["logits"]
        logits = output.clone() if isinstance(output, View) else output
        return probabilities(logits)


def spread(path: str, tokens: Tensor) -> list[float]:
    """On all GPUs, without state."""
    with cgbundle.load(path, devices=[0, 1], replicas=True) as replicas:
        everywhere: cgbundle.Replicas = replicas
        everywhere.warmup()
        decode: cgbundle.ReplicatedEntry = everywhere.decode
        session: cgbundle.Program = everywhere.session()
        print(everywhere.devices, [program.memory for program in everywhere.programs], decode(tokens), session(tokens))
        return probabilities(everywhere(tokens))


def attached(path: str, cache: Tensor) -> list[float]:
    """Replays graphs of an engine over a tensor of this process."""
    with cgbundle.attach(path, {"cache": cache}, device=0, unverified=False) as graphs:
        every: cgbundle.AttachedGraphs = graphs
        graph: cgbundle.AttachedGraph = every[8]
        graph.replay()
        every["decode"].replay(stream=0)
        print(graph.key, list(every), dict(every.memory))
        return probabilities(every.tensors["logits"])


if TYPE_CHECKING:
    # names that are not there are the checker's errors, too
    print(cgbundle.nosuch, cgcompile.nosuch)  # type: ignore[attr-defined]
    assert_type(cgcompile.BuildError("usage", "").hint, str)


def main() -> int:
    """The exit status."""
    tokens = Tensor(0, "int64", (0, 64), None, None)
    try:
        print(serve(sys.argv[1], tokens), spread(sys.argv[1], tokens), attached(sys.argv[1], tokens))
    except cgbundle.OutOfMemory as error:
        print(error.hint)
    except (cgbundle.ProgramClosed, cgbundle.SessionBusy, cgbundle.StateMissing, cgbundle.EntryMissing) as error:
        print(error)
    except (cgbundle.BundleError, cgbundle.MachineError, cgbundle.CallError) as error:
        print(error.code, error.kind)
    except cgbundle.CgbundleError as error:
        return error.exit_code
    return 0
