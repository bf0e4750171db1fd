"""A program with several regions as steps: copies between graphs and host, and their layouts."""

from __future__ import annotations

from cgbundle.format.schema import Value
from cgbundle.validate.programs import check_lifetimes, check_order
from cgcompile.partition.split import Partition, PlannedRegion
from cgcompile.targets.cuda.steps import LoweredRegions, program_row


def region(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    operations: tuple[str, ...] = ("op",),
    written: tuple[str, ...] = (),
) -> PlannedRegion:
    return PlannedRegion(
        name=name, kind="graph" if name.startswith("graph") else "host", reason="", nodes=operations, operations=operations,
        inputs=inputs, outputs=outputs, written=written,
    )  # fmt: skip


def value(memory: str, offset: int, strides: tuple[int, int] = (4, 1)) -> Value:
    return Value(dtype="float32", shape=(2, 4), strides=strides, memory=memory, offset=offset)


def lowered(**changed: object) -> LoweredRegions:
    plain = {"outputs": {}, "files": {}, "inputs": (), "uploads": {}, "state": {}, "passed_through": {}, "regions": {}}
    return LoweredRegions(**{**plain, **changed})  # type: ignore[arg-type]


def test_a_value_is_copied_once_when_the_other_side_first_reads_it() -> None:
    partition = Partition(
        regions=(
            region("graph-1", ("x",), ("a", "b")),
            region("host-1", ("a", "x"), ("h",)),
            region("graph-2", ("b", "h"), ("c",)),
            region("host-2", ("a", "c"), ("k",)),
        ),
        merged=(), inputs=("x",), outputs=("k", "c"), state=(),
    )  # fmt: skip
    program, host = program_row(
        (2,),
        partition,
        lowered(
            outputs={
                "graph-1": (value("arena", 0), value("arena", 256)),
                "graph-2": (value("arena", 512),),
                "host-1": (value("host", 0),),
                "host-2": (value("host", 0),),
            },
            files={"graph-1": "graphs/1", "graph-2": "graphs/2"},
            inputs=(value("inputs", 0),),
            uploads={"h": value("inputs", 256), "k": value("inputs", 512)},
            regions={"graph-1": 0, "graph-2": 1, "host-1": 2, "host-2": 3},
        ),
        arena=768,
        static=768,
    )
    kinds = [(step.kind, step.region if step.kind != "copy" else None) for step in program.steps]
    copy = ("copy", None)
    assert kinds == [("graph", 0), copy, copy, ("host", 2), copy, ("graph", 1), copy, ("host", 3), copy]
    places = [[(program.values[index].memory, program.values[index].offset) for index in step.inputs] for step in program.steps]
    assert places[3] == [("host", 0), ("host", 256)] and places[5] == [("arena", 256), ("inputs", 256)]
    assert places[7] == [("host", 0), ("host", 768)], "a is still there from its first copy"
    assert [program.values[index].memory for index in program.outputs] == ["inputs", "arena"]
    assert host == 5 * 256 and program.steps[0].file == "graphs/1"


def test_what_is_only_handed_through_the_host_keeps_its_layout() -> None:
    partition = Partition(
        regions=(region("host-1", ("x",), ("y",), ()), region("graph-1", ("y",), ("z",))),
        merged=(), inputs=("x",), outputs=("z",), state=(),
    )  # fmt: skip
    turned = (1, 2)
    program, _ = program_row(
        (2,),
        partition,
        lowered(
            outputs={"graph-1": (value("arena", 0),)},
            files={"graph-1": "graphs/1"},
            inputs=(value("inputs", 0, turned),),
            uploads={"y": value("inputs", 256, turned)},
            passed_through={"y": "x"},
            regions={"graph-1": 0},
        ),
        arena=256,
        static=512,
    )
    assert [step.kind for step in program.steps] == ["copy", "copy", "graph"]
    for step in program.steps[:2]:
        assert program.values[step.inputs[0]].strides == program.values[step.outputs[0]].strides == turned


def test_what_the_host_writes_to_goes_back_where_it_came_from() -> None:
    """x and y are inputs; the host writes to x and to the buffer b, and a graph writes to y in place."""
    partition = Partition(
        regions=(region("host-1", ("b", "x"), ("h",), written=("b", "x")), region("graph-1", ("h", "y"), ("z",), written=("y",))),
        merged=(), inputs=("x", "y"), outputs=("z",), state=("b",),
    )  # fmt: skip
    assert [part.module_outputs for part in partition.regions] == [("h", "b.after", "x.after"), ("z",)]
    program, _ = program_row(
        (2,),
        partition,
        lowered(
            outputs={"host-1": (value("host", 0),), "graph-1": (value("arena", 0),)},
            files={"graph-1": "graphs/1"},
            inputs=(value("inputs", 0, (1, 2)), value("inputs", 256)),
            uploads={"h": value("inputs", 512)},
            state={"b": value("state", 256)},
            regions={"graph-1": 0, "host-1": 1},
        ),
        arena=256,
        static=768,
    )
    check_order(program, "p", changed=(0, 1))
    check_lifetimes(program, "p")
    assert [step.kind for step in program.steps] == ["copy", "copy", "host", "copy", "copy", "copy", "graph"]
    rows = [[program.values[index] for index in (*step.inputs, *step.outputs)] for step in program.steps]
    for there, back, place in ((rows[0], rows[3], ("state", 256)), (rows[1], rows[4], ("inputs", 0))):
        assert (there[0].memory, there[0].offset) == (back[1].memory, back[1].offset) == place
        assert there[1].strides == back[0].strides == there[0].strides and there[1] != back[0]
    assert [(operand.memory, operand.offset) for operand in rows[6]] == [("inputs", 512), ("inputs", 256), ("arena", 0)]
