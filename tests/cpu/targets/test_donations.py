"""Rows of the manifest from donations(): names, dtypes, shapes, and outputs that cannot stay in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cgbundle.format.schema import DataSize, Donation, TensorSpec
from cgcompile.model.load import checked_donations
from cgcompile.targets.donations import check_layouts, donations_of
from tests.helpers.bundles.donation_bundles import write
from tests.helpers.raising import raises
from tests.pure.validate.test_donations import TAKE, value


def spec(name: str, shape: tuple[Any, ...], dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, order=tuple(range(len(shape))))


def described(
    name: str,
    inputs: list[TensorSpec],
    outputs: list[TensorSpec],
    aliases: tuple[Any, ...] = (),
    written: tuple[int, ...] = (),
    data_sizes: tuple[DataSize, ...] = (),
) -> Any:
    signature = SimpleNamespace(inputs=tuple(inputs), outputs=tuple(outputs), data_sizes=data_sizes)
    exported = SimpleNamespace(sizes_at=lambda key: {"batch": key[0]})
    return SimpleNamespace(
        name=name, signature=signature, aliases=aliases, written=written, exported=exported, keys=((1,), (8,))
    )  # fmt: skip


ENTRIES = [
    described("prefill", [spec("ids", ("batch", 4), "int64")], [spec("output", ("batch", 16))]),
    described(
        "decode",
        [spec("hidden", ("batch", 16)), spec("cache.0", (8, 16)), spec("ids", ("batch",), "int64")],
        [spec("hidden", ("batch", 16)), spec("cache.0", ("batch", 16)), spec("short", (2, 16))],
    ),
]


def test_rows_ascend_and_an_only_output_need_not_be_named() -> None:
    pairs = [("prefill", "decode.hidden"), ("decode.cache.0", "decode.cache.0"), ("decode.hidden", "decode.hidden")]
    assert donations_of(pairs, ENTRIES) == (
        Donation(source="decode", output=0, target="decode", input=0),
        Donation(source="decode", output=1, target="decode", input=1),
        Donation(source="prefill", output=0, target="decode", input=0),
    )
    assert donations_of([("prefill.output", "decode.hidden")], ENTRIES) == donations_of([("prefill", "decode.hidden")], ENTRIES)


@pytest.mark.parametrize(
    ("pair", "match"),
    [
        (
            ("encode", "decode.hidden"),
            r"encode -> decode.hidden: 'encode' is no entry \(did you mean decode\?\); the entries are prefill, decode",
        ),
        (("prefill.logits", "decode.hidden"), "'prefill.logits' is no output: 'prefill' has prefill.output"),
        (("decode", "decode.hidden"), "'decode' is no output: 'decode' has decode.hidden, decode.cache.0"),
        (("prefill", "decode.mask"), "'decode.mask' is no input: 'decode' has decode.hidden, decode.cache.0, decode.ids"),
        (("prefill", "decode"), "'decode' is no input"),
    ],
)
def test_names(pair: tuple[str, str], match: str) -> None:
    with raises("donation-unknown", match=match):
        donations_of([pair], ENTRIES)


def test_a_pair_stands_once() -> None:
    with raises("donation-unknown", match="prefill.output -> decode.hidden is given twice"):
        donations_of([("prefill", "decode.hidden"), ("prefill.output", "decode.hidden")], ENTRIES)


def test_dtypes_and_shapes() -> None:
    with raises("donation-unlike", match="the output is float32, the input int64"):
        donations_of([("prefill", "decode.ids")], ENTRIES)
    with raises("donation-unlike", match="their shapes are equal at none of the built sizes"):
        donations_of([("decode.short", "decode.hidden")], ENTRIES)


def test_outputs_that_lie_elsewhere_and_inputs_that_are_written() -> None:
    for memory, words in (("inputs", "one of its inputs"), ("state", "buffer 'cache'")):
        alias = SimpleNamespace(output=0, memory=memory, index=0, name="cache")
        prefill = described("prefill", [], [spec("output", ("batch", 16))], aliases=(alias,))
        with raises("donation-refused", match=words):
            donations_of([("prefill", "decode.hidden")], [prefill, ENTRIES[1]])
    sized = described("prefill", [], [spec("output", ("batch", 16))], data_sizes=(DataSize(output=0, axis=0, count=1),))
    with raises("donation-refused", match="the size of the output depends on data"):
        donations_of([("prefill", "decode.hidden")], [sized, ENTRIES[1]])
    fills = described("fill", [spec("into", ("batch", 16))], [spec("output", (1,))], written=(0,))
    with raises("donation-refused", match=r"fill\(\) writes to that input"):
        donations_of([("prefill", "fill.into")], [ENTRIES[0], fills])


def test_another_order_of_the_axes(tmp_path: Any) -> None:
    manifest = write(tmp_path / "chained.cgb")
    check_layouts(manifest)
    take = value(manifest, TAKE, 0, shape=(8, 8), strides=(1, 8))
    with raises("donation-unlike", match="make.output -> take.a: the axes of the output and of the input have different orders"):
        check_layouts(take)


@pytest.mark.parametrize("donations", [{"prefill": "decode"}, "prefill", [("prefill",)], [("prefill", 3)], ["ab"], None])
def test_what_is_no_list_of_pairs(donations: Any) -> None:
    with raises("source-invalid", match="model.py: donations: expected pairs of an output and an input"):
        checked_donations(donations, "model.py")
    assert checked_donations([["prefill", "decode.hidden"]], "model.py") == (("prefill", "decode.hidden"),)
