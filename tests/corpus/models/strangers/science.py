"""Gaussian processes, differential equations, flows, quantum circuits, neural operators, spiking neurons."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...case import Case, Made
from ..shared import fractions, noise
from .stranger import model_case, stranger

POINTS = {"points": (4, 9)}


class Mean(nn.Module):
    """Returns the mean and the variance of a Gaussian process's prediction."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicts at the points `x`."""
        predicted = self.model(x)
        return predicted.mean, predicted.variance


class Posterior(Mean):
    """The same for botorch models."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicts at the points `x`."""
        predicted = self.model.posterior(x)  # type: ignore[operator]
        return predicted.mean, predicted.variance


class Density(nn.Module):
    """Returns the log density of a flow's distribution."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Evaluates the log density at the points `x`."""
        distribution = self.flow() if type(self.flow).__module__.startswith("zuko") else self.flow
        return distribution.log_prob(x)


def exact_gp() -> Made:
    """An exact GP as in gpytorch's first tutorial: 12 observations of a sine."""
    import gpytorch

    class ExactGPModel(gpytorch.models.ExactGP):
        def __init__(self, train_x: torch.Tensor, train_y: torch.Tensor, likelihood: Any) -> None:
            super().__init__(train_x, train_y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.linspace(0, 1, 12)
    model = ExactGPModel(x, torch.sin(6 * x), gpytorch.likelihoods.GaussianLikelihood())
    return Mean(model), lambda points: (torch.rand(points),)


def variational_gp() -> Made:
    """A GP as in gpytorch's tutorial of stochastic variational regression."""
    import gpytorch

    class GPModel(gpytorch.models.ApproximateGP):
        def __init__(self, inducing_points: torch.Tensor) -> None:
            distribution = gpytorch.variational.CholeskyVariationalDistribution(inducing_points.size(0))
            strategy = gpytorch.variational.VariationalStrategy(self, inducing_points, distribution)
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    return Mean(GPModel(torch.rand(8, 2))), lambda points: (torch.rand(points, 2),)


def botorch_gp() -> Made:
    """The surrogate model of a Bayesian optimization in two dimensions."""
    from botorch.models import SingleTaskGP

    x = torch.rand(10, 2, dtype=torch.float64)
    model = SingleTaskGP(x, x.sum(1, keepdim=True).sin())
    return Posterior(model), lambda points: (torch.rand(points, 2, dtype=torch.float64),)


class Field(nn.Module):
    """A vector field, as in torchdiffeq's demo."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns dy/dt."""
        return self.net(y**3)


class Solved(nn.Module):
    """Returns the trajectory of the state through a field."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.field, self.method = Field(), method
        self.register_buffer("times", torch.linspace(0, 1, 6))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """Solves from the state `y` at time 0."""
        from torchdiffeq import odeint

        return odeint(self.field, y, self.times, method=self.method)


def ode(method: str) -> Case:
    """A neural differential equation with one of torchdiffeq's methods."""
    return model_case("ode", f"torchdiffeq.{method}", lambda: (Solved(method), lambda batch: (torch.randn(batch, 2),)))


class ControlledField(nn.Module):
    """The vector field of torchcde's example."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.channels, self.hidden = channels, hidden
        self.linear1, self.linear2 = nn.Linear(hidden, 16), nn.Linear(16, channels * hidden)

    def forward(self, t: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Returns a matrix for each row."""
        return self.linear2(self.linear1(z).relu()).tanh().view(z.size(0), self.hidden, self.channels)


class NeuralCDE(nn.Module):
    """The model of torchcde's example, with a fixed step size."""

    def __init__(self) -> None:
        super().__init__()
        self.func, self.initial, self.readout = ControlledField(3, 8), nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Computes the output from the coefficients of a spline."""
        import torchcde

        control = torchcde.CubicSpline(coefficients)
        z0 = self.initial(control.evaluate(control.interval[0]))
        z = torchcde.cdeint(X=control, func=self.func, z0=z0, t=control.interval, method="rk4", options={"step_size": 1.0})
        return self.readout(z[:, -1])


def cde() -> Made:
    """A neural CDE over a spline through six points with three channels."""
    return NeuralCDE(), lambda batch: (torch.randn(batch, 5, 12),)


def real_nvp() -> Made:
    """Two coupling layers of normflows."""
    import normflows

    flows = []
    for _ in range(2):
        net = normflows.nets.MLP([1, 16, 2], init_zeros=True)
        flows += [normflows.flows.AffineCouplingBlock(net), normflows.flows.Permute(2, mode="swap")]
    return Density(normflows.NormalizingFlow(normflows.distributions.base.DiagGaussian(2), flows)), lambda batch: (
        torch.randn(batch, 2),
    )


def nflows_model(kind: str) -> Made:
    """Two layers of a transform of nflows over a normal distribution."""
    from nflows.distributions.normal import StandardNormal
    from nflows.flows.base import Flow
    from nflows.transforms import autoregressive
    from nflows.transforms.base import CompositeTransform
    from nflows.transforms.permutations import ReversePermutation

    maker = getattr(autoregressive, kind)
    more = {"num_bins": 4, "tails": "linear", "tail_bound": 3.0} if "Quadratic" in kind else {}
    layers = [layer for _ in range(2) for layer in (ReversePermutation(4), maker(features=4, hidden_features=16, **more))]
    return Density(Flow(CompositeTransform(layers), StandardNormal([4]))), lambda batch: (torch.randn(batch, 4),)


def freia(block: str) -> Made:
    """Two invertible blocks of FrEIA."""
    import FrEIA.framework
    import FrEIA.modules

    def subnet(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Linear(before, 16), nn.ReLU(), nn.Linear(16, after))

    network = FrEIA.framework.SequenceINN(4)
    for _ in range(2):
        network.append(getattr(FrEIA.modules, block), subnet_constructor=subnet)
    return network, lambda batch: (torch.randn(batch, 4),)


def quantum_layer() -> Made:
    """PennyLane's torch layer, with two qubits on the simulator that is written in torch."""
    import pennylane as qml

    @qml.qnode(qml.device("default.qubit", wires=2), interface="torch")
    def circuit(inputs: Any, weights: Any) -> Any:
        qml.AngleEmbedding(inputs, wires=range(2))
        qml.BasicEntanglerLayers(weights, wires=range(2))
        return [qml.expval(qml.PauliZ(wire)) for wire in range(2)]

    layer = qml.qnn.TorchLayer(circuit, {"weights": (3, 2)})
    return nn.Sequential(nn.Linear(4, 2), layer, nn.Linear(2, 1)), lambda batch: (torch.randn(batch, 4),)


def deep_o_net() -> Made:
    """DeepXDE's operator network, with the torch backend."""
    import os

    os.environ["DDE_BACKEND"] = "pytorch"
    import deepxde

    net = deepxde.nn.DeepONetCartesianProd([10, 16, 16], [2, 16, 16], "relu", "Glorot normal")
    return net, lambda batch: ((torch.randn(batch, 10), torch.rand(7, 2)),)


def pinn() -> Made:
    """DeepXDE's fully connected network."""
    import os

    os.environ["DDE_BACKEND"] = "pytorch"
    import deepxde

    return deepxde.nn.FNN([2, 16, 16, 1], "tanh", "Glorot uniform"), lambda batch: (torch.rand(batch, 2),)


def spiking() -> Made:
    """Eight time steps through two leaky neurons, as in snnTorch's tutorial."""
    import snntorch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.lif1 = nn.Linear(10, 16), snntorch.Leaky(beta=0.9)
            self.fc2, self.lif2 = nn.Linear(16, 4), snntorch.Leaky(beta=0.9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second, spikes = self.lif1.init_leaky(), self.lif2.init_leaky(), []
            for _ in range(8):
                spike, first = self.lif1(self.fc1(x), first)
                spike, second = self.lif2(self.fc2(spike), second)
                spikes.append(spike)
            return torch.stack(spikes)

    return Net(), lambda batch: (3 * torch.randn(batch, 10),)


def liquid(cell: str) -> Made:
    """A network of `ncps` with the wiring of a worm's nervous system."""
    import ncps.torch
    import ncps.wirings

    return getattr(ncps.torch, cell)(6, ncps.wirings.AutoNCP(12, 2)), lambda batch: (torch.randn(batch, 7, 6),)


CASES = [
    model_case("gp", "gpytorch.ExactGP", exact_gp, sizes=POINTS),
    model_case("gp", "gpytorch.ApproximateGP", variational_gp, sizes=POINTS),
    model_case("gp", "botorch.SingleTaskGP", botorch_gp, sizes=POINTS),
    *[ode(method) for method in ("euler", "midpoint", "rk4", "dopri5")],
    model_case("ode", "torchcde.NeuralCDE", cde),
    stranger("flows", "zuko.flows:NSF", noise(3), wrapped=Density, features=3, transforms=2, hidden_features=(16, 16)),
    stranger("flows", "zuko.flows:MAF", noise(3), wrapped=Density, features=3, transforms=2, hidden_features=(16, 16)),
    stranger("flows", "zuko.flows:NICE", noise(4), wrapped=Density, features=4, transforms=2, hidden_features=(16, 16)),
    stranger("flows", "zuko.flows:GMM", noise(3), wrapped=Density, features=3, components=4),
    stranger("flows", "zuko.flows:NAF", noise(3), wrapped=Density, features=3, transforms=1, hidden_features=(16,)),
    model_case("flows", "normflows.RealNVP", real_nvp),
    model_case("flows", "nflows.MAF", lambda: nflows_model("MaskedAffineAutoregressiveTransform")),
    model_case("flows", "nflows.NSF", lambda: nflows_model("MaskedPiecewiseRationalQuadraticAutoregressiveTransform")),
    model_case("flows", "FrEIA.AllInOneBlock", lambda: freia("AllInOneBlock")),
    model_case("flows", "FrEIA.RNVPCouplingBlock", lambda: freia("RNVPCouplingBlock")),
    model_case("quantum", "pennylane.TorchLayer", quantum_layer),
    model_case("physics", "deepxde.DeepONet", deep_o_net),
    model_case("physics", "deepxde.FNN", pinn),
    stranger("physics", "neuralop.models:FNO", noise(3, 16, 16), n_modes=(6, 6), in_channels=3, out_channels=1,
        hidden_channels=8, n_layers=2),
    stranger("physics", "neuralop.models:TFNO", noise(3, 16, 16), n_modes=(6, 6), in_channels=3, out_channels=1,
        hidden_channels=8, n_layers=2, rank=0.2, factorization="tucker", implementation="factorized"),
    stranger("physics", "neuralop.models:UNO", noise(3, 16, 16), in_channels=3, out_channels=1, hidden_channels=8,
        uno_out_channels=[8, 8, 8], uno_n_modes=[[4, 4], [4, 4], [4, 4]], n_layers=3,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]], channel_mlp_skip="linear"),
    stranger("physics", "kan:KAN", fractions(2), width=[2, 4, 1], grid=3, k=3, auto_save=False, symbolic_enabled=False),
    model_case("spiking", "snntorch.Leaky", spiking),
    model_case("spiking", "ncps.CfC", lambda: liquid("CfC")),
    model_case("spiking", "ncps.LTC", lambda: liquid("LTC")),
]  # fmt: skip
