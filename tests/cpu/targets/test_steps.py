"""A program of several regions as steps: what is copied when, and how it lies."""

from __future__ import annotations

from cgbundle.format.schema import Value
from cgcompile.partition.split import Partition
from cgcompile.targets.cuda.steps import Lowered, program


def part(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], operations: tuple[str, ...] = ("op",)) -> Part:
    kind = "graph" if name.startswith("graph") else "host"
    return Part(name=name, kind=kind, reason="", nodes=operations, operations=operations, inputs=inputs, outputs=outputs)  # type: ignore[arg-type]


def value(memory: str, offset: int, strides: tuple[int, int] = (4, 1)) -> Value:
    return Value(dtype="float32", shape=(2, 4), strides=strides, memory=memory, offset=offset)


def lowered(**changed: object) -> Lowered:
    plain = {"graphs": {}, "files": {}, "given": (), "landing": {}, "hosts": {}, "handed": {}, "regions": {}}
    return Lowered(**{**plain, **changed})  # type: ignore[arg-type]


def test_a_value_is_copied_once_when_the_other_side_first_reads_it() -> None:
    parts = Partition(
        regions=(
            part("graph-1", ("x",), ("a", "b")),
            part("host-1", ("a", "x"), ("h",)),
            part("graph-2", ("b", "h"), ("c",)),
            part("host-2", ("a", "c"), ("k",)),
        ),
        merged=(), inputs=("x",), outputs=("k", "c"),
    )  # fmt: skip
    made, host = program(
        (2,),
        parts,
        lowered(
            graphs={"graph-1": ((), (value("arena", 0), value("arena", 256))), "graph-2": ((), (value("arena", 512),))},
            files={"graph-1": "graphs/1", "graph-2": "graphs/2"},
            given=(value("inputs", 0),),
            landing={"h": value("inputs", 256), "k": value("inputs", 512)},
            hosts={"host-1": (value("host", 0),), "host-2": (value("host", 0),)},
            regions={"graph-1": 0, "graph-2": 1, "host-1": 2, "host-2": 3},
        ),
        arena=768,
        static=768,
    )
    kinds = [(step.kind, step.region if step.kind != "copy" else None) for step in made.steps]
    copy = ("copy", None)
    assert kinds == [("graph", 0), copy, copy, ("host", 2), copy, ("graph", 1), copy, ("host", 3), copy]
    places = [[(made.values[index].memory, made.values[index].offset) for index in step.inputs] for step in made.steps]
    assert places[3] == [("host", 0), ("host", 256)] and places[5] == [("arena", 256), ("inputs", 256)]
    assert places[7] == [("host", 0), ("host", 768)], "a is still there from its first copy"
    assert [made.values[index].memory for index in made.outputs] == ["inputs", "arena"]
    assert host == 5 * 256 and made.steps[0].file == "graphs/1"


def test_what_is_only_handed_through_the_host_keeps_its_layout() -> None:
    parts = Partition(
        regions=(part("host-1", ("x",), ("y",), ()), part("graph-1", ("y",), ("z",))), merged=(), inputs=("x",), outputs=("z",)
    )
    turned = (1, 2)
    made, _ = program(
        (2,),
        parts,
        lowered(
            graphs={"graph-1": ((), (value("arena", 0),))},
            files={"graph-1": "graphs/1"},
            given=(value("inputs", 0, turned),),
            landing={"y": value("inputs", 256, turned)},
            handed={"y": "x"},
            regions={"graph-1": 0},
        ),
        arena=256,
        static=512,
    )
    assert [step.kind for step in made.steps] == ["copy", "copy", "graph"]
    for step in made.steps[:2]:
        assert made.values[step.inputs[0]].strides == made.values[step.outputs[0]].strides == turned
