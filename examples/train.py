"""A training step as an entry of a bundle: forward, backward and the optimizer in one replay; `evaluate` is another entry.

    cgcompile build examples/train.py --sizes evaluate:batch=1,32 -o train.cgb
    python examples/train.py train.cgb --steps 200 --save trained.safetensors

A bundle can only change buffers, so the network's parameters become buffers.  `torch.func` computes the loss from them, and
`make_fx` traces the loss's gradient to operations that torch.export accepts.  No operation depends on the order in which a GPU's
threads add, so a resumed run is bitwise equal to an uninterrupted one.  The task: every token is the sum of the two before it,
modulo the size of the vocabulary.
"""

import argparse
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 17, 32, 64, 4, 2
BATCH = 32
"""Rows of a step; its gradient is traced for this size."""


class Block(nn.Module):
    """Causal attention and an MLP, each after a LayerNorm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("hidden", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        query, key, value = self.qkv(self.attention_norm(x)).view(batch, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
        mixed = torch.softmax(scores.masked_fill(self.hidden, float("-inf")), -1) @ value
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, LENGTH, WIDTH))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Network(nn.Module):
    """Token ids (batch, LENGTH) -> logits of the next token at every position (batch, LENGTH, VOCABULARY).

    Tokens are looked up by a product with one-hot rows, whose gradient is also a product.  The gradient of `nn.Embedding` uses
    atomic additions on a GPU, in a different order every time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("vocabulary", torch.arange(VOCABULARY), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        one_hot = (ids.unsqueeze(-1) == self.vocabulary).to(self.tokens.weight.dtype)
        return self.head(self.norm(self.blocks(one_hot @ self.tokens.weight + self.places.weight)))


class Trainer(nn.Module):
    """A network whose parameters are buffers, and the momentum of each."""

    def __init__(self, network: nn.Module, rate: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__()
        self.rate, self.momentum = rate, momentum
        self.trained = tuple([name for name, _ in network.named_parameters()])
        tracer = make_fx(grad_and_value(lambda values, x, y: loss_of(network, values, x, y)))
        self.gradients = tracer({name: value.detach().clone() for name, value in network.named_parameters()}, *sequences(BATCH))
        for module in network.modules():
            for name, value in list(module._parameters.items()):
                del module._parameters[name]
                module.register_buffer(name, value.detach())
        self.network = network
        for name in self.trained:
            self.register_buffer(f"momentum_{name.replace('.', '_')}", torch.zeros_like(network.get_buffer(name)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Makes one step of gradient descent on ids and their next tokens, int64 (BATCH, LENGTH); returns the loss before it."""
        values = {name: self.network.get_buffer(name) for name in self.trained}
        gradients, loss = self.gradients(values, x, y)
        for name, value in values.items():
            velocity = self.get_buffer(f"momentum_{name.replace('.', '_')}")
            velocity.mul_(self.momentum).add_(gradients[name])
            value.sub_(self.rate * velocity)
        self.steps += 1
        return loss

    def evaluate(self, x: Tensor) -> Tensor:
        """Returns the likeliest next token at every position, int64 (batch, LENGTH)."""
        return self.network(x).argmax(-1)


def loss_of(network: nn.Module, values: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Returns the mean cross entropy, with `values` as the network's weights."""
    return F.cross_entropy(functional_call(network, values, (x,)).flatten(0, 1), y.flatten())


def sequences(batch: int) -> tuple[Tensor, Tensor]:
    """Returns ids of the task and their next tokens."""
    rows = [torch.randint(0, VOCABULARY, (batch,)) for _ in range(2)]
    for _ in range(LENGTH - 1):
        rows.append((rows[-1] + rows[-2]) % VOCABULARY)
    ids = torch.stack(rows, 1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Trainer(Network()).eval()


def entries():
    def step():
        return sequences(BATCH)

    def evaluate(batch: int):
        return sequences(batch)[:1]

    return {"step": step, "evaluate": evaluate}


def main() -> None:
    from safetensors.torch import load_file, save_file

    import cgbundle

    parser = argparse.ArgumentParser(description="Trains with a bundle of this file.")
    parser.add_argument("bundle")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--resume", metavar="FILE", help="state that an earlier run saved")
    parser.add_argument("--save", metavar="FILE", help="where to write the state")
    args = parser.parse_args()
    program = cgbundle.load(args.bundle)
    for name, value in (load_file(args.resume) if args.resume else {}).items():
        program.state[name] = value
    done = int(torch.from_dlpack(program.state["steps"]))
    for number in range(done, done + args.steps):
        torch.manual_seed(number + 1)
        loss = program.step(*sequences(BATCH))
        if number % 20 == 0 or number == done + args.steps - 1:
            print(f"step {number}: loss {float(loss):.4f}")
    x, y = sequences(BATCH)
    accuracy = (program.evaluate(x) == y)[:, 1:].float().mean()
    print(f"{accuracy:.1%} of the next tokens are right")
    if args.save:
        save_file({name: torch.from_dlpack(program.state[name]).clone() for name in program.state}, args.save)


if __name__ == "__main__":
    main()
