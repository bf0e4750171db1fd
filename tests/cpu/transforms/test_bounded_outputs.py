"""Outputs with data-dependent sizes: padded to a bound in the program, and returned with eager PyTorch's sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.export import Dim  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle.format.archive import read_manifest  # noqa: E402
from cgcompile.export.bounded.axes import Unsupported, depends  # noqa: E402
from cgcompile.transforms.bounded.rewrite import Bounded, with_bounds  # noqa: E402
from tests.helpers.models.selecting_models import Head, boxes  # noqa: E402
from tests.helpers.raising import raises  # noqa: E402

Function = Callable[[Tensor, Tensor], Any]

MOST = 40


# --- torchvision's operator, if torchvision is not installed ---------------------------------------------------------


def _suppressed(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Returns the positions of the kept boxes, one box after the other."""
    kept, gone = [], torch.zeros(len(scores), dtype=torch.bool)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    for at in scores.sort(stable=True, descending=True)[1].tolist():
        if not gone[at]:
            kept.append(at)
            wide = torch.minimum(boxes[:, 2], boxes[at, 2]) - torch.maximum(boxes[:, 0], boxes[at, 0])
            high = torch.minimum(boxes[:, 3], boxes[at, 3]) - torch.maximum(boxes[:, 1], boxes[at, 1])
            shared = wide.clamp(min=0) * high.clamp(min=0)
            gone |= shared / (areas[at] + areas - shared) > threshold
    return torch.tensor(kept, dtype=torch.int64)


@pytest.fixture(scope="module")
def nms() -> Any:
    if hasattr(torch.ops.torchvision, "nms"):
        yield torch.ops.torchvision.nms
        return
    with torch.library._scoped_library("torchvision", "DEF") as library:
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", _suppressed, "CPU")
        size = lambda: torch.library.get_ctx().create_unbacked_symint()  # noqa: E731  as torchvision does, which asserts 2 boxes
        torch.library.register_fake(
            "torchvision::nms", lambda boxes, scores, threshold: boxes.new_empty(size(), dtype=torch.int64), lib=library
        )
        yield torch.ops.torchvision.nms


# --- programs --------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A function of boxes [n, 4] and scores [n]."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, boxes: Tensor, scores: Tensor) -> Any:
        return tuple(tree_leaves(self.function(boxes, scores)))


def exported(function: Function) -> Any:
    rows = {0: Dim("n", max=MOST)}
    inputs = torch.rand(10, 4), torch.rand(10)
    return torch.export.export(Model(function), inputs, dynamic_shapes=(rows, rows), strict=False)


def inputs(seed: int, ties: bool = False) -> tuple[Tensor, Tensor]:
    """Returns random inputs. Of some the model selects no row or all rows. With `ties`, many scores are equal."""
    torch.manual_seed(seed)
    rows = (3, 4, 9, 16, MOST)[seed % 5]
    boxes, scores = torch.rand(rows, 4), torch.rand(rows)
    if seed % 6 < 2:
        return boxes * 0 + 0.9 * (seed % 6), scores * 0 + 0.9 * (seed % 6)
    return boxes, (scores * 4).round() / 4 if ties else scores


def check(function: Function, bounded: Bounded, ties: bool = True) -> None:
    """Checks that the program gives eager PyTorch's outputs, padded with zeros."""
    module = bounded.program.module(check_guards=False)
    for seed in range(40):
        tensors = inputs(seed, ties and seed % 2 == 0)
        wanted, actual = Model(function)(*tensors), module(*tensors)
        sizes = {(output, axis): int(actual[count]) for output, axis, count in bounded.axes}
        for index, want in enumerate(wanted):
            got = actual[index]
            assert [sizes.get((index, axis), size) for axis, size in enumerate(got.shape)] == list(want.shape)
            front = got[tuple([slice(0, size) for size in want.shape])]
            torch.testing.assert_close(front, want, rtol=1e-5, atol=1e-6, equal_nan=True)
            if want.dtype in (torch.int64, torch.bool):
                assert torch.equal(front, want)
            rest = got.clone()
            rest[tuple([slice(0, size) for size in want.shape])] = 0
            assert not rest.any()


def boxes_of(b: Tensor) -> Tensor:
    return torch.cat([b[:, :2], b[:, :2] + b[:, 2:] * 0.6], 1)


def two_selections(b: Tensor, s: Tensor) -> Any:
    first = b[s > 0.3]
    second = first[first[:, 0] > 0.4]
    return first, second, second.sum(1), (first[:, 1] > 0.5).nonzero()


def detections(b: Tensor, s: Tensor) -> Any:
    keep = s > 0.5
    boxes, scores = b[keep], s[keep]
    best, label = boxes.max(1)
    order = scores.argsort(descending=True, stable=True)
    return torch.cat([boxes[order], scores[order][:, None]], 1)[:5], label[order], best.sigmoid()


def divided(b: Tensor, s: Tensor) -> Any:
    kept = (s * 4).long()
    kept = kept[kept != 0]
    return 12 // kept, 12 % kept, kept * kept.shape[0]


def overlapping(b: Tensor, s: Tensor) -> Any:
    """Non-maximum suppression of all pairs at once, as packages without torchvision write it for graphs."""
    order = s.argsort(descending=True, stable=True)
    boxes = boxes_of(b)[order]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    keep = ~torch.triu(shared / (areas[:, None] + areas - shared) > 0.3, 1).any(0)
    return boxes[keep], order[keep]


SUPPORTED: dict[str, Function] = {
    "nonzero": lambda b, s: (s > 0.5).nonzero(),
    "nonzero of numbers": lambda b, s: (s.nonzero(), torch.argwhere(b > 0.5), torch.where(b > 0.5)),
    "two masks": lambda b, s: (b[s > 0.5], s[b[:, 0] > 0.3]),
    "masked_select": lambda b, s: (torch.masked_select(b, b > 0.5), b.masked_select(s[:, None] > 0.5)),
    "other axes": lambda b, s: (b.t()[:, s > 0.5], b[s > 0.5, 1], b[:, None][s > 0.5, 0], b[b > 0.5]),
    "unique": lambda b, s: torch.unique((s * 8).long() - 4, return_inverse=True, return_counts=True),
    "unique floats": lambda b, s: torch.unique((b * 4).round() / 4, return_inverse=True),
    "unique booleans": lambda b, s: torch.unique(s > 0.5, return_counts=True),
    "unique of selected": lambda b, s: torch.unique((s * 6).long()[s > 0.3], return_inverse=True, return_counts=True),
    "unique_consecutive": lambda b, s: torch.unique_consecutive((s * 2).long(), return_inverse=True, return_counts=True),
    "consecutive selected": lambda b, s: torch.unique_consecutive((s * 2).long()[s > 0.3], return_counts=True),
    "two selections": two_selections,
    "detections": detections,
    "divided": divided,
    "overlapping": overlapping,
    "negative positions": lambda b, s: (k := b[s > 0.5])[(k[:, 0] > 0.5).nonzero()[:, 0] - 1],
    "views": lambda b, s: ((k := b[s > 0.5]).view(-1, 2, 2), k.flatten(), k.unsqueeze(1).expand(-1, 3, -1)),
    "sums": lambda b, s: ((k := b[s > 0.5])[:, None] > k[None]).any(-1).sum(1),
    "products": lambda b, s: ((k := b[s > 0.5]) @ b[s < 0.2].T, (k @ k.T).softmax(-1) @ k),
    "joined": lambda b, s: torch.cat([b[s > 0.5], b[s <= 0.5], b[s > 2]]),
    "new tensors": lambda b, s: (torch.ones_like(k := b[s > 0.5]), k.new_zeros(k.shape[0]), torch.arange(k.shape[0])),
    "along rows": lambda b, s: ((k := b[s > 0.5]).cumsum(0), s[s > 0.5].softmax(0), k.flip(1)),
    "norms": lambda b, s: (nn.functional.layer_norm(k := b[s > 0.5], (4,)), nn.functional.normalize(k, dim=1)),
    "written before": lambda b, s: (b.clone().fill_(0.5) + b)[s > 0.5],
    "half": lambda b, s: (b.half()[s > 0.5], b.bfloat16()[s > 0.5] * 2),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_program_gives_the_rows_of_eager_pytorch(name: str) -> None:
    bounded = with_bounds(exported(SUPPORTED[name]), told_gpu=False)
    assert bounded is not None
    check(SUPPORTED[name], bounded)
    assert not [node.name for node in bounded.program.graph.nodes if depends(node)]


@pytest.mark.parametrize(
    "function",
    [lambda b, s: ((k := b[s > 0.5]).sum(0), k), lambda b, s: (k := b[s > 0.5]) - k.mean(0)],
    ids=["returned", "used by rows"],
)
def test_values_of_fixed_size_keep_their_operations(function: Function) -> None:
    bounded = with_bounds(exported(function), told_gpu=False)
    assert bounded is not None
    check(function, bounded)
    assert [node.name for node in bounded.program.graph.nodes if depends(node)] == ["index"]


def test_suppression(nms: Any) -> None:
    def filtered(b: Tensor, s: Tensor) -> Any:
        keep = s > 0.3
        boxes, scores = boxes_of(b)[keep], s[keep]
        label = (scores * 30).long() % 3
        kept = nms(boxes + label[:, None] * 10.0, scores, 0.3)[:7]
        return boxes[kept], scores[kept], label[kept]

    def plain(b: Tensor, s: Tensor) -> Any:
        boxes = boxes_of(b)
        kept = nms(boxes, s, 0.4)
        return boxes[kept], kept

    def levels(b: Tensor, s: Tensor) -> Any:
        first, second = s > 0.3, b[:, 0] < 0.5
        boxes = torch.cat([boxes_of(b)[first], boxes_of(b)[second]])
        scores = torch.cat([s[first], s[second] * 0.5])
        kept = nms(boxes, scores, 0.4)
        return boxes[kept], scores[kept]

    for function in (filtered, plain, levels):
        bounded = with_bounds(exported(function), told_gpu=False)
        assert bounded is not None
        check(function, bounded)
        assert not [node for node in bounded.program.graph.nodes if "torchvision" in str(node.target)]


REFUSED: dict[str, Function] = {
    "aten.repeat_interleave.self_Tensor": lambda b, s: b.repeat_interleave((s * 3).long(), 0),
    "aten.bincount.default": lambda b, s: torch.bincount((s * 5).long()),
    "aten.flip.default": lambda b, s: b[s > 0.5].flip(0),
    "aten.unique_dim.default": lambda b, s: torch.unique((b * 2).long(), dim=0),
    "aten.squeeze.default": lambda b, s: (s > 0.5).nonzero().squeeze(),
    "aten.squeeze.dim": lambda b, s: b[s > 0.5].squeeze(0),
    "aten.reshape.default": lambda b, s: b.t()[:, s > 0.5].reshape(-1),
    "aten.full.default of a size": lambda b, s: torch.full(((k := b[s > 0.5]).shape[0],), k.shape[0]),
    "aten.slice.Tensor of a size": lambda b, s: b[b[s > 0.5].shape[0] :],
    "aten.amax.default": lambda b, s: ((k := b[s > 0.5])[:, None] - k[None]).amax(1),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_known_to_keep_rows_apart(said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        with_bounds(exported(REFUSED[said]), told_gpu=False)


def _filled(b: Tensor, s: Tensor) -> Tensor:
    kept = b[s > 0.5]
    kept[:, 0] = 0
    return kept


def _filled_by_a_view(b: Tensor, s: Tensor) -> Tensor:
    kept = b[s > 0.5]
    kept[0].fill_(2)
    return kept


def _written_between(b: Tensor, s: Tensor) -> Any:
    other = b.clone()
    kept = other[s > 0.5]
    other.add_(1)
    return kept, other[s > 0.5]


@pytest.mark.parametrize("function", [_filled, _filled_by_a_view, _written_between])
def test_writes_in_place_are_not_moved(function: Function) -> None:
    with pytest.raises(Unsupported, match="a write in place"):
        with_bounds(exported(function), told_gpu=False)


def lookup(b: Tensor, s: Tensor) -> Any:
    """Indexes the rows of one selection with positions from another selection, which may be larger."""
    return b[s > 0.5][(s > 0.3).nonzero()[:, 0] - 2]


def selected_at(b: Tensor, s: Tensor) -> Any:
    return b[s > 0.5].index_select(0, (s > 0.3).nonzero()[:, 0])


@pytest.mark.parametrize("function", [lookup, selected_at])
def test_a_position_beyond_the_selected_rows_is_refused_as_eager_pytorch_does(function: Function) -> None:
    bounded = with_bounds(exported(function), told_gpu=False)
    assert bounded is not None
    module, refused = bounded.program.module(check_guards=False), 0
    for seed in range(40):
        tensors = inputs(seed)
        try:
            (wanted,) = Model(function)(*tensors)
        except (IndexError, RuntimeError):
            refused += 1
            with pytest.raises((IndexError, RuntimeError), match="out of"):
                module(*tensors)
            continue
        actual, count = module(*tensors)
        torch.testing.assert_close(actual[: int(count)], wanted)
    assert 5 < refused < 35


def test_an_assertion_of_the_model_about_a_selection_stays() -> None:
    def checked(b: Tensor, s: Tensor) -> Any:
        torch._check((kept := b[s > 0.5]).shape[0] >= 2)
        return kept

    bounded = with_bounds(exported(checked), told_gpu=False)
    assert bounded is not None
    assert any(node.target is torch.ops.aten._assert_scalar.default for node in bounded.program.graph.nodes)


def test_a_program_without_such_outputs_is_left_alone() -> None:
    assert with_bounds(exported(lambda b, s: (b + 1, b[s > 0.5].sum(0))), told_gpu=False) is None


# --- bundles ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "head.cgb"
    sizes = {"forward": {"n": [5, 12]}, "largest": {"n": [5]}}
    return cgcompile.build(Head().eval(), {"forward": boxes, "largest": boxes}, sizes=sizes, out=out, target="cpu").path


@pytest.mark.parametrize("outputs", ["copy", "view"])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_calls_return_true_sizes(bundle: Path, outputs: str, kind: str) -> None:
    model, seen = Head().eval(), set()
    with cgbundle.load(bundle, outputs=outputs) as program:
        for seed in range(40):
            torch.manual_seed(seed)
            (x,) = boxes((5, 12)[seed % 2])
            x = x * 0 - 30 if seed % 5 == 0 else x.abs() * 30 if seed % 5 == 1 else x
            actual = program(x if kind == "torch" else x.numpy())
            wanted = model(x)
            seen.add(len(wanted["boxes"]))
            assert list(actual) == list(wanted)
            for want, got in zip(tree_leaves(wanted), tree_leaves(actual), strict=True):
                value = got.tensor if outputs == "view" else got
                value = value if kind == "torch" else torch.from_numpy(numpy.asarray(value).copy())
                torch.testing.assert_close(value, want.detach())
        assert program.largest(boxes(5)[0]).shape == (4,)
        assert {0, 12} & seen and len(seen) > 4
        with raises("key-missing", match="cannot be padded"):
            program(boxes(7)[0])


def test_the_manifest_says_what_is_padded(bundle: Path) -> None:
    manifest = read_manifest(str(bundle))
    counts = [spec.name for spec in manifest.entries[0].outputs if spec.name.endswith(".rows")]
    assert counts == ["boxes.rows", "labels.0.rows"]
    assert {(manifest.entries[0].outputs[row.output].name, row.axis) for row in manifest.entries[0].data_sizes} == {
        ("boxes", 0), ("again", 0), ("best", 0), ("scores", 0), ("rows", 0), ("labels.0", 0), ("labels.2", 0), ("pairs", 0),
    }  # fmt: skip
    assert not manifest.entries[1].data_sizes
    assert {finding.rule for finding in manifest.entries[0].findings if finding.severity == "note"} == {"data-dependent-shape"}


class Suppressed(nn.Module):
    """A detector that reads the number of boxes before and after the suppression."""

    def __init__(self, nms: Any) -> None:
        super().__init__()
        self.nms = nms

    def forward(self, b: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes [n, 4] and scores [n]."""
        boxes, scores = boxes_of(b)[s > 0.3], s[s > 0.3]
        if len(boxes) == 0:
            return torch.empty(0, 4), torch.empty(0)
        kept = self.nms(boxes, scores, 0.3)
        if len(kept) > 3:
            kept = kept[:3]
        return boxes[kept], scores[kept]


def test_suppression_inside_of_a_branch(tmp_path: Path, nms: Any) -> None:
    model = Suppressed(nms)
    cgcompile.build(model, lambda n: (torch.rand(n, 4), torch.rand(n)), sizes=[3, 9], out=tmp_path / "detector.cgb", target="cpu")
    with cgbundle.load(str(tmp_path / "detector.cgb"), on_miss="error") as program:
        for seed in range(40):
            torch.manual_seed(seed)
            tensors = torch.rand((3, 9)[seed % 2], 4), torch.rand((3, 9)[seed % 2]) * (seed % 4) / 3
            wanted, actual = model(*tensors), program(*tensors)
            assert [value.shape for value in actual] == [value.shape for value in wanted]
            torch.testing.assert_close(list(actual), list(wanted))


def test_sizes_without_a_bound_are_refused_by_name(tmp_path: Path) -> None:
    function = lambda b, s: b.repeat_interleave((s * 3).long(), 0)  # noqa: E731
    with raises("data-dependent-output", match="depends on data"):
        cgcompile.build(
            Model(function), lambda n: (torch.rand(n, 4), torch.rand(n)), sizes=[4], out=tmp_path / "x.cgb", target="cpu"
        )


def test_a_bundle_for_a_gpu_that_is_not_here_has_one_graph(tmp_path: Path, nms: Any) -> None:
    pytest.importorskip("triton")

    def function(b: Tensor, s: Tensor) -> Any:
        boxes = boxes_of(b)
        kept = nms(boxes, s, 0.3)
        return boxes[kept], kept, torch.unique((s * 4).long())

    out = tmp_path / "head.cgb"
    cgcompile.build(Model(function), lambda: (torch.rand(9, 4), torch.rand(9)), out=out, target="sm_90")
    manifest = read_manifest(str(out))
    assert [[step.kind for step in program.steps] for program in manifest.entries[0].programs] == [["graph"]]
    assert [proof.method for proof in manifest.entries[0].self_test.proofs] == ["interpret"]
    assert [(row.output, row.axis, row.count) for row in manifest.entries[0].data_sizes] == [(0, 0, 3), (1, 0, 3), (2, 0, 4)]
