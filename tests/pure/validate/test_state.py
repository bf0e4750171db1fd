"""Data that lasts between calls, and outputs that share memory: each rule on both sides of its limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cgbundle.format import manifest_json
from cgbundle.format.schema import Alias, EntrySpec, FrozenWeight, Manifest, Region, Value, Weight
from cgbundle.validate import programs, state
from cgbundle.validate.manifest import check_frozen
from cgbundle.validate.state import base_of, check_state
from cgcompile.bundle import manifest_text
from tests.helpers.bundles import state_bundles
from tests.helpers.bundles.edits import edited
from tests.helpers.raising import raises


def of_entry(check: Callable[[Manifest, EntrySpec], None]) -> Callable[[Manifest], None]:
    """Returns a check of the first entry."""
    return lambda manifest: check(manifest, manifest.entries[0])


check_aliases, check_alias_spans, check_changes, check_programs = map(
    of_entry, (state.check_aliases, state.check_alias_spans, state.check_changes, programs.check_programs)
)

ROWS = {"total": 0, "marks": 1, "random": 2}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return state_bundles.write(tmp_path_factory.mktemp("state"))


def row(manifest: Manifest, name: str, **changes: Any) -> Manifest:
    weights = [replace(weight, **changes) if weight.name == name else weight for weight in manifest.weights]
    return replace(manifest, weights=tuple(weights))


def number(manifest: Manifest, name: str) -> int:
    return [weight.name for weight in manifest.weights].index(name)


def bad(check: Callable[[Manifest], None], manifest: Manifest, words: str) -> None:
    with raises("manifest-invalid", match=words):
        check(manifest_json.decode(manifest_text.encode(manifest)))


# --- state -----------------------------------------------------------------------------------------------------------


def test_rows_of_state_fill_it_to_its_end(manifest: Manifest) -> None:
    fits = row(row(manifest, "marks", offset=768, shape=(256,)), "random", offset=256)
    check_state(fits)
    bad(check_state, row(fits, "marks", shape=(257,)), r"weights\[\d\].offset: outside memory state")
    without = replace(manifest, memories=tuple([pair for pair in manifest.memories if pair[0] != "state"]))
    bad(check_state, without, "outside memory state")
    alone = replace(without, regions=(), random=None)
    for size, fit in ((0, True), (1, False)):
        weight = replace(manifest.weights[number(manifest, "total")], dtype="uint8", shape=(size,), strides=(1,), offset=0)
        changed = replace(alone, weights=(weight,))
        check_state(changed) if fit else bad(check_state, changed, "outside memory state")


@pytest.mark.parametrize("offset", [1, 128, 255, 257])
def test_rows_of_state_are_aligned(manifest: Manifest, offset: int) -> None:
    bad(check_state, row(manifest, "marks", offset=offset), r"weights\[\d\].offset: is not aligned")


def test_rows_of_state_lie_apart(manifest: Manifest) -> None:
    check_state(row(manifest, "total", shape=(64,)))  # 256 bytes, up to the next row
    bad(check_state, row(manifest, "total", shape=(65,)), "overlaps another row of memory state")
    check_state(row(row(manifest, "total", offset=768), "marks", offset=0))  # in any order
    for name in ("total", "marks"):
        bad(check_state, row(manifest, name, offset=512), "overlaps another row of memory state")
    last = row(row(manifest, "marks", shape=(256,)), "random", offset=256)
    bad(check_state, last, "overlaps another row of memory state")


def test_a_row_of_state_has_a_tensor_of_its_own(manifest: Manifest) -> None:
    for name in ("total", "marks"):
        bad(check_state, row(manifest, name, tensor="random"), "is another weight's, too, and calls change it")
        bad(check_state, row(manifest, name, tensor="offsets"), "is another weight's, too, and calls change it")
    check_state(row(manifest, "offsets", tensor="small"))  # two weights may share one tensor if no call changes them


def test_what_an_update_leaves_alone_ascends_and_says_why(manifest: Manifest) -> None:
    def fixed(*rows: tuple[int, str], sha256: str = "0" * 64) -> Manifest:
        return edited(manifest, frozen=tuple([FrozenWeight(weight=weight, reason=why, sha256=sha256) for weight, why in rows]))

    every = [(index, "state" if weight.memory == "state" else "constant") for index, weight in enumerate(manifest.weights)]
    state, plain = [number(manifest, name) for name in ("total", "offsets")]
    check_frozen(fixed(*every))
    check_frozen(fixed((plain, "folded")))
    bad(check_frozen, fixed(*every, (len(every), "constant")), rf"frozen\[{len(every)}\].weight: is no weight, or not ascending")
    bad(check_frozen, fixed((-1, "constant")), r"frozen\[0\].weight: -1 is below 0")
    bad(check_frozen, fixed(*every[:2][::-1]), r"frozen\[1\].weight: is no weight, or not ascending")
    bad(check_frozen, fixed(every[0], every[0]), r"frozen\[1\].weight: is no weight, or not ascending")
    for weight, why, memory in ((state, "folded", "state"), (plain, "state", "weights")):
        bad(check_frozen, fixed((weight, why)), rf"frozen\[0\].reason: '{why}' of a weight of memory {memory}")
    for sha256 in ("", "0" * 63, "A" * 64):
        bad(check_frozen, fixed((plain, "folded"), sha256=sha256), r"frozen\[0\].sha256: is no SHA-256")


def test_what_python_read_has_a_line_and_nothing_else_has(manifest: Manifest) -> None:
    plain = number(manifest, "offsets")

    def fixed(reason: str, where: str) -> Manifest:
        return edited(manifest, frozen=(FrozenWeight(weight=plain, reason=reason, sha256="0" * 64, where=where),))

    check_frozen(fixed("baked", "model.py:3"))
    bad(check_frozen, fixed("baked", ""), r"frozen\[0\].where: '' of a weight that is baked")
    bad(check_frozen, fixed("folded", "model.py:3"), r"frozen\[0\].where: 'model.py:3' of a weight that is folded")


def test_a_host_region_reads_no_state_of_the_gpu(manifest: Manifest) -> None:
    def hosted(name: str, kind: str = "cuda") -> Manifest:
        region = Region(name="h", kind="host", reason="", file="host/h.so", constants=(("c", number(manifest, name)),))
        return replace(manifest, regions=(*manifest.regions, region), target=replace(manifest.target, kind=kind))

    check_state(hosted("offsets"))
    check_state(hosted("total", kind="cpu"))
    bad(check_state, hosted("total"), r"regions\[1\].constants: a host region over state, which lies on the GPU")


def test_the_random_numbers_state_is_two_integers(manifest: Manifest) -> None:
    for changes in ({"dtype": "int32"}, {"shape": (3,)}, {"shape": (2, 1), "strides": (1, 1)}):
        bad(check_state, row(manifest, "random", **changes), "random: weight 'random' is not two integers of memory state")
    bad(check_state, row(manifest, "random", memory="weights"), "is not two integers of memory state")
    for place in (-2, len(manifest.weights)):
        bad(check_state, edited(manifest, random=place), f"random: (no weight {place}|{place} is below 0)")
    last = edited(manifest, weights=(manifest.weights[number(manifest, "random")],), random=0)
    check_state(replace(last, regions=()))
    bad(check_state, replace(row(last, "random", shape=(3,)), regions=()), "is not two integers of memory state")
    check_state(edited(manifest, random=None))


def test_calls_of_a_model_with_state_are_not_cut_nor_padded(manifest: Manifest) -> None:
    (dimension,) = manifest.entries[0].dimensions
    for changes in ({"pad": "rows"}, {"pad": "zeros"}, {"chunk": True}):
        changed = edited(manifest, dimensions=(replace(dimension, **changes),))  # type: ignore[arg-type]
        bad(check_changes, changed, "batch is padded or chunked, and calls change state")
        check_changes(edited(changed, mutated_buffers=()))  # allowed for an entry that only reads the state
        only = tuple([weight for weight in changed.weights if weight.name not in ("total", "marks")])
        check_state(replace(changed, weights=only, random=[weight.name for weight in only].index("random")))


# --- aliases ---------------------------------------------------------------------------------------------------------


def aliased(manifest: Manifest, *aliases: tuple[int, str, int]) -> Manifest:
    return edited(manifest, aliases=tuple([Alias(output=output, memory=memory, index=index) for output, memory, index in aliases]))


def test_aliases_that_are_sound(manifest: Manifest) -> None:
    check_aliases(manifest)
    check_programs(manifest)
    check_alias_spans(manifest)
    check_aliases(aliased(manifest))
    check_aliases(aliased(manifest, (0, "inputs", 0)))
    check_aliases(aliased(manifest, (5, "outputs", 4)))
    check_aliases(aliased(manifest, (0, "outputs", 5), (1, "state", number(manifest, "random"))))
    check_aliases(aliased(manifest, (2, "outputs", 0), (3, "outputs", 0)))
    check_aliases(aliased(manifest, (2, "weights", 0)))


def test_aliases_that_are_not(manifest: Manifest) -> None:
    total, weights = number(manifest, "total"), len(manifest.weights)
    for aliases, words in (
        ([(1, "inputs", 0), (0, "inputs", 0)], "aliases: not ascending"),
        ([(1, "inputs", 0), (1, "state", total)], "aliases: not ascending, or an output occurs twice"),
        ([(0, "arena", 0)], r"aliases\[0\].memory: expected one of inputs"),
        ([(6, "inputs", 0)], r"aliases\[0\].output: no output 6"),
        ([(-1, "inputs", 0)], r"aliases\[0\].output: -1 is below 0"),
        ([(0, "inputs", 1)], r"aliases\[0\].index: no number 1 of the inputs"),
        ([(0, "inputs", -1)], r"aliases\[0\].index: -1 is below 0"),
        ([(0, "outputs", 6)], r"aliases\[0\].index: no number 6 of the outputs"),
        ([(0, "weights", weights)], rf"aliases\[0\].index: no number {weights} of the weights"),
        ([(0, "state", -1)], r"aliases\[0\].index: -1 is below 0"),
        ([(0, "weights", total)], r"aliases\[0\].index: that weight is in another memory"),
        ([(0, "state", 0)], r"aliases\[0\].index: that weight is in another memory"),
        ([(2, "outputs", 2)], r"aliases\[0\].index: an output that is an alias itself"),
        ([(2, "inputs", 0), (3, "outputs", 2)], r"aliases\[1\].index: an output that is an alias itself"),
    ):  # fmt: skip
        bad(check_aliases, aliased(manifest, *aliases), words)


def output(manifest: Manifest, place: int, **changes: Any) -> Manifest:
    """Returns the manifest with a changed value of an output in the last program."""
    program = manifest.entries[0].programs[-1]
    values = list(program.values)
    values[program.outputs[place]] = replace(values[program.outputs[place]], **changes)
    return edited(manifest, programs=(*manifest.entries[0].programs[:-1], replace(program, values=tuple(values))))


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5])
def test_an_alias_lies_inside_of_what_it_shares_memory_with(manifest: Manifest, place: int) -> None:
    """One element further on either side, the alias is refused."""
    program = manifest.entries[0].programs[-1]
    value = program.values[program.outputs[place]]
    (alias,) = [alias for alias in manifest.entries[0].aliases if alias.output == place]
    base = base_of(manifest, program, alias)
    begin, end = base.offset, base.offset + 4 * _floats(base)
    where = rf"programs\[1\].outputs\[{place}\]: lies outside of what it shares memory with"
    last = end - 4 * _floats(value)
    for offset in (begin, last):
        check_alias_spans(output(manifest, place, offset=offset))
    for offset in (begin - 4, last + 4):
        bad(check_alias_spans, output(manifest, place, offset=offset), where)
    bad(check_alias_spans, output(manifest, place, offset=begin - 1, dtype="uint8"), where)
    if begin < last:
        bad(check_alias_spans, output(manifest, place, offset=begin + 2), "begins 2 bytes into what .*, inside of an element")
    elsewhere = "weights" if base.memory != "weights" else "arena"
    bad(
        check_alias_spans,
        output(manifest, place, memory=elsewhere),
        f"an alias in memory {elsewhere}, of something in {base.memory}",
    )


def _floats(value: Value | Weight) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True))


def on_cpu(manifest: Manifest) -> Manifest:
    """Returns the manifest for the cpu target, where every alias begins at the start of the shared memory."""
    programs = []
    for program in manifest.entries[0].programs:
        values = list(program.values)
        for index in program.outputs[1:]:
            values[index] = replace(values[index], offset=0, memory="host")
        programs.append(replace(program, values=tuple(values)))
    return edited(manifest, programs=tuple(programs), target=replace(manifest.target, kind="cpu"))


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5])
def test_on_the_cpu_an_alias_counts_from_what_it_shares_memory_with(manifest: Manifest, place: int) -> None:
    cpu_manifest = on_cpu(manifest)
    check_alias_spans(cpu_manifest)
    program = cpu_manifest.entries[0].programs[-1]
    (alias,) = [alias for alias in cpu_manifest.entries[0].aliases if alias.output == place]
    most = 4 * (_floats(base_of(cpu_manifest, program, alias)) - _floats(program.values[program.outputs[place]]))
    check_alias_spans(output(cpu_manifest, place, offset=most))
    for offset in (-4, most + 4):
        bad(check_alias_spans, output(cpu_manifest, place, offset=offset), r"lies outside of what")


def test_an_output_does_not_share_memory_with_a_weight_of_the_host(manifest: Manifest) -> None:
    words = "output 5 shares memory with a weight that is not on the GPU"
    bad(check_alias_spans, row(manifest, "offsets", memory="host"), words)
    others = edited(
        manifest, aliases=tuple([alias for alias in manifest.entries[0].aliases if alias.memory in ("inputs", "outputs")])
    )
    assert len({alias.memory for alias in others.entries[0].aliases}) == 2
    for weight in others.weights:  # the number of an input or output in an alias is no number of a weight
        check_alias_spans(row(others, weight.name, memory="host"))


def test_what_an_alias_shares_memory_with(manifest: Manifest) -> None:
    program = manifest.entries[0].programs[0]

    def base(memory: str, index: int) -> Value:
        return base_of(manifest, program, Alias(output=1, memory=memory, index=index))

    assert base("inputs", 0) is program.values[program.inputs[0]]
    assert [base("outputs", place) for place in range(6)] == [program.values[place] for place in program.outputs]
    for name in ("total", "marks"):
        weight = manifest.weights[number(manifest, name)]
        value = base("state", number(manifest, name))
        assert (value.dtype, value.shape, value.strides, value.memory, value.offset) == (
            weight.dtype, weight.shape, weight.strides, "state", weight.offset,
        )  # fmt: skip
