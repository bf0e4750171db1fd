"""The benchmark: measures cold starts in new workers, then times calls in one worker for the bundle and one for each baseline.

Workers take turns, so that changes of the machine's speed affect all of them equally.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cgbundle.format.archive import Archive
from cgbundle.format.file_names import entry_named
from cgbundle.format.schema import EntrySpec, IntKey, Manifest
from cgbundle.self_test import BITS, name_key
from cgbundle.tensors.comparison import nearest
from cgbundle.validate import bundle as verify

from ...errors import BuildError
from ...util.progress import Stages, Watcher, silent
from .baselines import BASELINES, TORCH, choose
from .processes import WorkerProcess, compiler_cache, write_job
from .protocol import PHASES, STAY
from .report import BUNDLE, Benchmark, Error, Memory, Timing, Way, this_machine

ROUNDS = 5
SHOWN = 4
"""SHOWN: the default maximum number of measured int_keys, because baselines compile or capture each of them."""

COLD, WARM = "compile", "compile-warm"
"""Baselines that differ only in their cache: the first one fills it.  Calls of both are timed in one worker."""

WORKER = {COLD: "compile", WARM: "compile"}
"""The worker's argument, if it is not the baseline's name."""


@dataclass(kw_only=True, slots=True)
class _State:
    """Results of one baseline, or of the bundle, so far."""

    starts: list[tuple[float, ...]] = field(default_factory=list)
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    memory: Memory | None = None
    errors: dict[int, Error] = field(default_factory=dict)
    why: str = ""
    about: dict[str, Any] = field(default_factory=dict)


def measure(
    path: str | os.PathLike[str],
    *,
    against: Sequence[str] = (),
    keys: Sequence[IntKey] = (),
    rounds: int = ROUNDS,
    model: str = "",
    entry: str = "",
    progress: Watcher | None = None,
    threads: int | None = None,
) -> Benchmark:
    """Measures the bundle at `path` and its baselines, and compares all outputs with the self-test.

    - `against`: names in `baselines.BASELINES`; default: all that the bundle's target supports.
    - `keys`: int_keys of the bundle; default: all, at most four.
    - `rounds`: number of new workers for the bundle and each baseline, and of turns of timed calls.  torch.compile with an empty
      cache is measured once.
    - `threads`: CPU threads of a call; default: the default of the bundle and of each baseline.
    - `entry`: the entry that is measured; default: the first.
    - `model`: a model.py or package.module:attribute that PyTorch runs instead of the bundle's own program.

    A baseline that fails, or whose packages are missing, has a row with the reason.  KeyboardInterrupt stops the benchmark and
    returns the results so far.  Raises baseline-unknown, source-missing, bench-failed if the bundle does not run, and the errors of
    an invalid bundle.  Raises ValueError for rounds below 1, or an int_key that the bundle lacks.
    """
    folder = os.path.abspath(path)
    bundle = Archive(os.fspath(path))
    verify.check_bundle(bundle)
    manifest, spec = bundle.manifest, entry_named(bundle.manifest, entry)
    recorded = [program.key for program in spec.programs]
    if model.endswith((".py", ".pt2")) and not os.path.isfile(model):
        raise BuildError("source-missing", f"{model}: no such model file")
    if rounds < 1 or any(key not in recorded for key in keys):
        raise ValueError("expected 1 round or more, and int_keys of the bundle")
    chosen = [key for key in recorded if key in keys] if keys else some(recorded)
    live, skipped = choose(against, manifest.target.kind)
    ways = [BUNDLE, *live]
    states = {
        name: _State(why=skipped.get(name, "")) for name in (BUNDLE, *[name for name in BASELINES if name in {*live, *skipped}])
    }
    load = os.getloadavg()[0]
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="cgcompile-bench-") as scratch:
        run = _Run(
            folder=Path(scratch),
            job=write_job(folder, manifest, spec, chosen, model, Path(scratch), threads),
            cache=compiler_cache(Path(scratch, "cache")),
            states=states,
            spec=spec,
            cpu=manifest.target.kind == "cpu",
            keys=chosen,
            own_model=bool(model),
        )
        stages = Stages(progress or silent)
        try:
            run.prepare(ways, stages)
            run.cold(ways, rounds, stages)
            run.calls(ways, rounds, stages)
        except KeyboardInterrupt:
            interrupted = True
    return Benchmark(
        path=os.fspath(path),
        name=manifest.name,
        target=manifest.target.kind,
        machine=this_machine(states[BUNDLE].about, load),
        keys=tuple(chosen),
        names=tuple([name_key(spec, key) for key in chosen]),
        recorded=len(recorded),
        rounds=rounds,
        ways=tuple([_way(name, state, chosen) for name, state in states.items()]),
        notes=tuple(_notes(states, manifest, spec, model, load)),
        interrupted=interrupted,
    )


def some(keys: Sequence[IntKey], limit: int = SHOWN) -> list[IntKey]:
    """Returns at most `limit` int_keys, evenly spaced from the first to the last, in their order."""
    if len(keys) <= limit:
        return list(keys)
    return [keys[round(index * (len(keys) - 1) / (limit - 1))] for index in range(limit)]


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Run:
    """The workers of one benchmark and their working folder.  Results go to `states`."""

    folder: Path
    job: Path
    cache: dict[str, str]
    states: dict[str, _State]
    spec: EntrySpec
    cpu: bool
    keys: Sequence[IntKey]
    own_model: bool

    def prepare(self, ways: Sequence[str], stages: Stages) -> None:
        """Starts the bundle once, to check that it runs.  Then exports its program for the baselines, as Python and as ONNX."""
        torch = [name for name in ways if name in TORCH]
        exports = [(torch, "python", "the program as Python")] if torch and not self.own_model else []
        if "ort" in ways:
            exports.append((["ort"], "onnx", "the program for ONNX Runtime"))
        with stages("prepare") as tell:
            self._start(BUNDLE, tell, "", measured=False)
            for names, form, description in exports:
                tell(description)
                module, log = "cgcompile.tools.bench.export_program", self.folder / "prepare.log"
                with self._failing(*names), WorkerProcess(module, self.job, form, log=log) as worker:
                    worker.answer()
            tell.result(", ".join(["the bundle runs", *(description for _, _, description in exports)]))

    def cold(self, ways: Sequence[str], rounds: int, stages: Stages) -> None:
        """Measures cold starts of new workers: first one start each to fill the page cache, then `rounds` starts in turns.  For
        torch.compile with an empty cache, the first start is the measured one."""
        turns = [name for name in ways if name != COLD]
        with stages("warm up") as tell:
            for name in turns:
                if name not in (BUNDLE, WARM):
                    self._start(name, tell, "", measured=False)
            filler = COLD if COLD in ways else WARM
            if filler in ways and not self.states[filler].why:
                tell(f"{COLD}, empty cache")
                both = [name for name in (COLD, WARM) if name in self.states]
                with self._failing(*both), self._worker(COLD, self.cache) as worker:
                    self._take(filler, worker.answer(), start=filler == COLD)
        with stages("cold") as tell:
            for index in range(rounds):
                for name in turns:
                    self._start(name, tell, f"round {index + 1} of {rounds}, ")
            tell.result(f"{rounds} round{'s' if rounds > 1 else ''} of fresh processes")

    def calls(self, ways: Sequence[str], rounds: int, stages: Stages) -> None:
        """Times calls in one worker for the bundle and one for each baseline.  All workers run at the same time and take turns."""
        shares_worker = COLD in ways and WARM in ways
        timed = [name for name in ways if not (shares_worker and name == WARM)]
        kinds = ("call",) if self.cpu else ("device", "dispatch")
        with stages("calls") as tell, ExitStack() as stack:
            workers: dict[str, WorkerProcess] = {}
            for name in timed:
                if self.states[name].why:
                    continue
                tell(f"starting {name}")
                with self._failing(name):
                    worker = stack.enter_context(self._worker(name, self.cache, STAY))
                    self._take(name, worker.answer(), start=False)
                    workers[name] = worker
            for index in range(rounds):
                for number in range(len(self.keys)):
                    for kind in kinds:
                        for name, worker in list(workers.items()):
                            tell(f"round {index + 1} of {rounds}, {name}")
                            with self._failing(name):
                                seconds = worker.ask(f"{kind} {number}")["seconds"]
                                self.states[name].seconds.setdefault((kind, number), []).append(seconds)
                            if self.states[name].why:
                                del workers[name]
            tell.result(f"{rounds} round{'s' if rounds > 1 else ''} in turns")

    def _start(self, name: str, tell: Callable[[str], None], when: str, measured: bool = True) -> None:
        """Measures one cold start."""
        if not self.states[name].why:
            tell(f"{when}{name}")
            with self._failing(name), self._worker(name, self.cache if name == WARM else {}) as worker:
                self._take(name, worker.answer(), start=measured)

    def _worker(self, name: str, environment: dict[str, str], *more: str) -> WorkerProcess:
        module, log = "cgcompile.tools.bench.worker", self.folder / f"{name}.log"
        return WorkerProcess(module, WORKER.get(name, name), self.job, *more, log=log, environment=environment)

    def _take(self, name: str, answer: dict[str, Any], start: bool) -> None:
        """Stores a worker's answer.  `start`: whether the phases of its start count.  Errors of outputs always count."""
        state = self.states[name]
        if start:
            state.starts.append(tuple([answer["laps"].get(phase, 0.0) for phase in PHASES]))
        state.memory = Memory(device=answer.get("device", -1), **answer["memory"])
        state.about |= answer
        for number, row in enumerate(answer["errors"]):
            deviation = self._error(name, number, row)
            if number not in state.errors or deviation.error > state.errors[number].error or deviation.wrong:
                state.errors[number] = deviation
        if name == BUNDLE and answer["torch"]:
            raise BuildError("bench-failed", "the bundle's process imported torch, so this does not measure serving without torch")

    def _error(self, name: str, number: int, row: dict[str, Any]) -> Error:
        """Returns the error and its bound.  The bound of the bundle is that of its self-test.  For a baseline, the bundle's error
        is added to this bound, because both are compared with the self-test."""
        proof = next(proof for proof in self.spec.self_test.proofs if proof.key == self.keys[number])
        allowed = self.spec.self_test.bounds
        if name == BUNDLE:
            allowed = tuple([0.0 if self.spec.self_test.compare == BITS else bound for bound in allowed])
        else:
            proof_errors = proof.errors or [proof.error] * len(allowed)
            allowed = tuple([bound + error if bound else 0.0 for bound, error in zip(allowed, proof_errors, strict=True)])
        error, bound = nearest(zip(row["errors"], allowed, strict=False))  # state is not compared, so `row` may be shorter
        return Error(key=self.keys[number], error=error, allowed=bound, exact=row["exact"])

    @contextmanager
    def _failing(self, *names: str) -> Iterator[None]:
        """Records a failure of the block in the rows of `names`.  Raises bench-failed if the bundle is one of them."""
        try:
            yield
        except BuildError as error:
            if error.code != "baseline-failed":
                raise
            if BUNDLE in names:
                raise BuildError("bench-failed", f"the bundle does not run here: {error}", error.hint) from None
            for name in names:
                self.states[name].why = self.states[name].why or f"failed: {error}"


# --- the report -------------------------------------------------------------------------------------------------------


def _way(name: str, state: _State, keys: Sequence[IntKey]) -> Way:
    timings = [Timing(what=what, key=keys[number], seconds=tuple(seconds)) for (what, number), seconds in state.seconds.items()]
    return Way(
        name=name,
        starts=tuple(state.starts),
        timings=tuple(timings),
        memory=state.memory,
        errors=tuple([state.errors[number] for number in sorted(state.errors)]),
        why=state.why,
    )


def _notes(states: dict[str, _State], manifest: Manifest, spec: EntrySpec, model: str, load: float) -> list[tuple[str, str]]:
    """Returns notes that explain the numbers."""
    notes = []
    cores = len(os.sched_getaffinity(0))
    if load > cores / 2:
        notes.append(("noise", f"the machine was busy before: load average {load:.1f} on {cores} cores; measure again when idle"))
    cuda = manifest.target.kind == "cuda"
    if any(name in TORCH and states[name].memory for name in states):
        ours = "run the bundle's program as plain operations (--model: your module)"
        notes.append(("PyTorch", f"baselines run the module of {model}" if model else f"baselines {ours}"))
        if cuda and not model and any(region.kind == "host" for region in manifest.regions):
            notes.append(("host", "regions that the bundle runs on the host, PyTorch runs on the GPU here"))
    if COLD in states and states[COLD].starts:
        notes.append((COLD, f"with an empty cache, measured once; {WARM} starts with what it left there"))
    if WARM in states and states[WARM].starts:
        if not states[WARM].about.get("hits"):
            notes.append((WARM, "found nothing in its cache: its figures are those of an empty one"))
        if COLD in states and states[COLD].seconds:
            notes.append((WARM, f"its calls are those of {COLD}"))
    if cuda:
        notes.append(("calls", 'take inputs on the GPU and leave outputs there (the bundle: outputs="view")'))
    if manifest.random is not None:
        notes.append(("outputs", "not compared: the model draws random numbers"))
    if spec.data_sizes:
        notes.append(("outputs", "not compared: their sizes depend on data"))
    return notes
