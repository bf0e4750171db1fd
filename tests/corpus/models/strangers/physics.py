"""More models of physics: circuits, spheres, curved spaces, spiking networks, rotations, flows."""

from __future__ import annotations

import torch
from torch import nn

from ...case import Made
from ..shared import noise
from .stranger import model_case, stranger


def circuit() -> Made:
    """Expectation values of a PyQTorch circuit whose angles are inputs."""
    import pyqtorch

    class Expected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.circuit = pyqtorch.QuantumCircuit(2, [pyqtorch.RX(0, "a"), pyqtorch.RY(1, "b"), pyqtorch.CNOT(0, 1)])
            self.observable = pyqtorch.Observable([pyqtorch.Z(0)])

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return pyqtorch.expectation(self.circuit, values={"a": a, "b": b}, observable=self.observable)

    return Expected(), lambda batch: (torch.rand(batch), torch.rand(batch))


def harmonics() -> Made:
    """A field on the sphere, filtered in spherical harmonics."""
    from torch_harmonics import InverseRealSHT, RealSHT

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.forward_transform, self.inverse = RealSHT(8, 16), InverseRealSHT(8, 16)
            self.weight = nn.Parameter(torch.rand(self.forward_transform.lmax, self.forward_transform.mmax))

        def forward(self, field: torch.Tensor) -> torch.Tensor:
            return self.inverse(self.forward_transform(field) * self.weight)

    return Filter(), lambda batch: (torch.randn(batch, 8, 16),)


def poincare() -> Made:
    """Distances in the Poincare ball, by geoopt."""
    import geoopt

    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ball = geoopt.PoincareBall()
            self.places = geoopt.ManifoldParameter(0.1 * torch.randn(5, 3), manifold=self.ball)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.ball.dist(self.ball.expmap0(x)[:, None], self.places)

    return Distances(), lambda batch: (0.2 * torch.randn(batch, 3),)


def spiking_jelly() -> Made:
    """Four time steps through two layers of leaky neurons, as in SpikingJelly's tutorial."""
    from spikingjelly.activation_based import functional, layer, neuron

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                layer.Linear(10, 16), neuron.LIFNode(step_mode="m"), layer.Linear(16, 4), neuron.LIFNode(step_mode="m")
            )
            functional.set_step_mode(self.layers, "m")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            functional.reset_net(self.layers)
            return self.layers(x.repeat(4, 1, 1)).mean(0)

    return Net(), lambda batch: (2 * torch.randn(batch, 10),)


def norse() -> Made:
    """The same network with norse, whose neurons return their state."""
    import norse.torch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.cell = nn.Linear(10, 16), norse.torch.LIFCell()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state, spikes = None, []
            for _ in range(4):
                spike, state = self.cell(self.linear(x), state)
                spikes.append(spike)
            return torch.stack(spikes)

    return Net(), lambda batch: (20 * torch.randn(batch, 10),)


def points(batch: int) -> dict[str, torch.Tensor]:
    """Draws residues with their local frames."""
    rotations = torch.linalg.qr(torch.randn(batch, 6, 3, 3))[0]
    return {
        "single_repr": torch.randn(batch, 6, 16), "pairwise_repr": torch.randn(batch, 6, 6, 16), "rotations": rotations,
        "translations": torch.randn(batch, 6, 3), "mask": torch.ones(batch, 6, dtype=torch.bool),
    }  # fmt: skip


def steerable() -> Made:
    """A rotation-equivariant convolution of e2cnn, and an invariant pooling."""
    from e2cnn import gspaces
    from e2cnn import nn as enn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            space = gspaces.Rot2dOnR2(4)
            self.before = enn.FieldType(space, [space.trivial_repr])
            after = enn.FieldType(space, 2 * [space.regular_repr])
            self.convolution = enn.R2Conv(self.before, after, kernel_size=3, padding=1)
            self.rest = enn.SequentialModule(enn.ReLU(after), enn.GroupPooling(after))

        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            return self.rest(self.convolution(enn.GeometricTensor(pictures, self.before))).tensor

    return Net(), lambda batch: (torch.randn(batch, 1, 9, 9),)


def coupling(kind: str) -> Made:
    """A flow of torchflows."""
    from torchflows.bijections.finite.autoregressive import architectures
    from torchflows.flows import Flow

    flow = Flow(getattr(architectures, kind)((4,), n_layers=2))

    class Density(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow = flow

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.flow.log_prob(x)

    return Density(), lambda batch: (torch.randn(batch, 4),)


def autoregressive() -> Made:
    """A masked autoregressive network of Pyro."""
    from pyro.nn import AutoRegressiveNN

    return AutoRegressiveNN(4, [16], param_dims=[1, 1]), lambda batch: (torch.randn(batch, 4),)


def arm() -> Made:
    """The position of the hand of a robot with two joints."""
    import pytorch_kinematics

    robot = """<robot name="arm"><link name="base"/><link name="upper"/><link name="hand"/>
      <joint name="first" type="revolute"><parent link="base"/><child link="upper"/><axis xyz="0 0 1"/>
      <origin xyz="0 0 0.1"/></joint>
      <joint name="second" type="revolute"><parent link="upper"/><child link="hand"/><axis xyz="0 1 0"/><origin xyz="0.5 0 0"/>
      </joint></robot>"""
    chain = pytorch_kinematics.build_serial_chain_from_urdf(robot, "hand")

    class Hand(nn.Module):
        def forward(self, angles: torch.Tensor) -> torch.Tensor:
            return chain.forward_kinematics(angles).get_matrix()

    return Hand(), lambda batch: (torch.randn(batch, 2),)


CASES = [
    model_case("quantum", "pyqtorch.QuantumCircuit", circuit),
    model_case("physics", "torch_harmonics.RealSHT", harmonics),
    model_case("geometry", "geoopt.PoincareBall", poincare),
    model_case("geometry", "e2cnn.R2Conv", steerable),
    model_case("geometry", "pytorch_kinematics.Chain", arm),
    stranger("geometry", "invariant_point_attention:InvariantPointAttention", inputs=points, dim=16, heads=2, scalar_key_dim=4,
        scalar_value_dim=4),
    model_case("spiking", "spikingjelly.LIFNode", spiking_jelly),
    model_case("spiking", "norse.LIFCell", norse),
    model_case("flows", "torchflows.RealNVP", lambda: coupling("RealNVP")),
    model_case("flows", "torchflows.CouplingRQNSF", lambda: coupling("CouplingRQNSF")),
    model_case("flows", "pyro.AutoRegressiveNN", autoregressive),
    stranger("physics", "pina.model:FeedForward", noise(2), input_dimensions=2, output_dimensions=1, layers=[16, 16]),
    stranger("physics", "neurodiffeq.networks:FCNN", noise(2), n_input_units=2, n_output_units=1, hidden_units=(16, 16)),
    stranger("physics", "neurodiffeq.networks:Resnet", noise(2), n_input_units=2, n_output_units=1, hidden_units=(16, 16)),
]  # fmt: skip
