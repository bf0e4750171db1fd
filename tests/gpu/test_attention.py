"""Attention of one row in one kernel: decoding steps over a cache in state equal eager PyTorch on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import cgbundle
from cgbundle.program.opening import MODES

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

from torch import Tensor, nn  # noqa: E402

HEADS, PLACES, HEAD = 8, 80, 32
WIDTH = HEADS * HEAD


class Step(nn.Module):
    """One decoding step of two layers with an MLP after each; keys and values have `shared` heads."""

    def __init__(self, shared: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shared = shared
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, (HEADS + 2 * shared) * HEAD) for _ in range(2)])
        self.mlp = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)]
        )
        self.norm = nn.LayerNorm(WIDTH)
        for name in ("keys0", "values0", "keys1", "values1"):
            self.register_buffer(name, torch.zeros(1, shared, PLACES, HEAD))
        self.to(dtype)

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        later = torch.arange(PLACES, device=x.device) > place
        for layer in range(2):
            query, key, value = self.qkv[layer](self.norm(x)).view(1, -1, 1, HEAD).split((HEADS, self.shared, self.shared), 1)
            keys, values = [self.get_buffer(f"{name}{layer}") for name in ("keys", "values")]
            keys.copy_(keys.index_copy(2, place, key)), values.copy_(values.index_copy(2, place, value))
            if self.shared < HEADS:
                repeats = HEADS // self.shared
                keys, values = [
                    tensor[:, :, None].expand(-1, -1, repeats, -1, -1).reshape(1, HEADS, PLACES, HEAD) for tensor in (keys, values)
                ]
            scores = (query @ keys.transpose(-2, -1)).float() / HEAD**0.5
            mixed = torch.softmax(scores.masked_fill(later, float("-inf")), -1).to(x.dtype) @ values
            x = x + mixed.view(1, -1)
            x = x + self.mlp[layer](x)
        return x


@pytest.mark.parametrize("record", ["capture", "cross-compile"])
@pytest.mark.parametrize(("shared", "dtype"), [(HEADS, torch.float32), (2, torch.bfloat16)])
def test_steps_over_a_cache(record: str, shared: int, dtype: torch.dtype, tmp_path: Path) -> None:
    import cgcompile

    torch.manual_seed(0)
    model = Step(shared, dtype).eval()
    path = tmp_path / "step.cgb"
    proof = {"prove": "none"} if record == "cross-compile" else {}
    inputs = torch.randn(1, WIDTH, dtype=dtype), torch.tensor([3])
    cgcompile.build(model, lambda: inputs, out=path, target="cuda", record=record, **proof)
    assert any(b"attention" in file.read_bytes() for file in (path / "graphs").iterdir())
    bound = 2e-2 if dtype is torch.bfloat16 else 2e-4
    eager = model.cuda()
    for mode in MODES:
        for buffer in eager.buffers():
            buffer.zero_()
        with cgbundle.load(path, mode=mode) as program, torch.no_grad():
            for place in [*range(24), 79, 5, 24]:
                inputs = torch.randn(1, WIDTH, dtype=dtype, device="cuda"), torch.tensor([place], device="cuda")
                got, wanted = program(*inputs), eager(*inputs)
                torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)
