"""Policies and value functions of reinforcement learning, and robot motion."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import nn

from ...case import Case, Made
from .stranger import model_case

STATE = 6


def states(batch: int) -> tuple[torch.Tensor]:
    """Draws observations."""
    return (torch.randn(batch, STATE),)


def spaces(discrete: bool) -> tuple[Any, Any]:
    """Returns the observation space and the action space: four actions, or two numbers."""
    from gymnasium.spaces import Box, Discrete

    limit = numpy.full(STATE, 10.0, numpy.float32)
    return Box(-limit, limit), Discrete(4) if discrete else Box(-numpy.ones(2, numpy.float32), numpy.ones(2, numpy.float32))


class Chosen(nn.Module):
    """Returns the deterministic action of a stable-baselines3 policy."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Calls the policy as its documentation exports it to ONNX."""
        return self.policy(observation, deterministic=True)


def baseline(module: str, discrete: bool) -> Case:
    """A policy of stable-baselines3 with one small layer."""

    def make() -> Made:
        import importlib

        kind = importlib.import_module(f"stable_baselines3.{module}.policies").MlpPolicy
        return Chosen(kind(*spaces(discrete), lambda _: 1e-3, net_arch=[16])), states

    return model_case("control", f"stable_baselines3.{module}_{'choice' if discrete else 'numbers'}", make)


def tianshou_net(kind: str) -> Made:
    """A network of Tianshou, without its recurrent state."""
    from tianshou.utils.net import common, discrete

    net = common.Net(state_shape=(STATE,), action_shape=4, hidden_sizes=[16], softmax=kind == "softmax")
    if kind == "actor":
        net = common.Net(state_shape=(STATE,), hidden_sizes=[16])
        net = discrete.DiscreteActor(preprocess_net=net, action_shape=4)
    elif kind == "dueling":
        net = common.Net(state_shape=(STATE,), action_shape=4, hidden_sizes=[16],
                         dueling_param=({"hidden_sizes": [8]}, {"hidden_sizes": [8]}))  # fmt: skip

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.net(observation)[0]

    return First(), states


def torchrl(kind: str) -> Made:
    """A network of TorchRL."""
    from torchrl.modules import MLP, DTActor

    if kind == "DTActor":
        model = DTActor(
            STATE,
            2,
            transformer_config={
                "n_embd": 16,
                "n_layer": 1,
                "n_head": 2,
                "n_inner": 16,
                "n_positions": 32,
                "activation": "relu",
                "resid_pdrop": 0.1,
                "attn_pdrop": 0.1,
            },
        )
        return model, lambda batch: (torch.randn(batch, 5, STATE), torch.randn(batch, 5, 2), torch.randn(batch, 5, 1))
    return MLP(in_features=STATE, out_features=4, num_cells=[16, 16]), states


def rsl_rl() -> Made:
    """A network of rsl_rl, with its normalization of observations."""
    from rsl_rl.models import MLPModel
    from tensordict import TensorDict

    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            example = TensorDict({"policy": torch.randn(2, STATE)}, batch_size=[2])
            self.model = MLPModel(example, {"actor": ["policy"]}, "actor", 3, hidden_dims=[16], obs_normalization=True)

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.model(TensorDict({"policy": observation}, batch_size=[observation.size(0)]))

    return Actor(), states


def skrl() -> Made:
    """A deterministic policy of skrl, written as in its documentation."""
    from skrl.models.torch import DeterministicMixin, Model

    class Policy(DeterministicMixin, Model):
        def __init__(self) -> None:
            observed, done = spaces(discrete=False)
            Model.__init__(self, observation_space=observed, action_space=done, device="cpu")
            DeterministicMixin.__init__(self, clip_actions=True)
            self.net = nn.Sequential(nn.Linear(STATE, 16), nn.ELU(), nn.Linear(16, 2))

        def compute(self, inputs: Any, role: str = "") -> Any:
            return self.net(inputs["observations"]), {}

    class Acts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = Policy()

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.policy.act({"observations": observation, "states": observation}, role="policy")[0]

    return Acts(), states


def pfrl(kind: str) -> Made:
    """A network of PFRL."""
    import pfrl.nn

    if kind == "DuelingDQN":
        from pfrl.q_functions import DuelingDQN

        class Values(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.values = DuelingDQN(4)

            def forward(self, pictures: torch.Tensor) -> torch.Tensor:
                return self.values(pictures).greedy_actions

        return Values(), lambda batch: (torch.rand(batch, 4, 84, 84),)
    return pfrl.nn.MLP(STATE, 4, (16,)), states


CASES = [
    baseline("ppo", discrete=True),
    baseline("ppo", discrete=False),
    baseline("dqn", discrete=True),
    baseline("sac", discrete=False),
    baseline("td3", discrete=False),
    *[model_case("control", f"tianshou.{kind}", lambda kind=kind: tianshou_net(kind)) for kind in ("softmax", "actor", "dueling")],
    *[model_case("control", f"torchrl.{kind}", lambda kind=kind: torchrl(kind)) for kind in ("MLP", "DTActor")],
    model_case("control", "rsl_rl.MLPModel", rsl_rl),
    model_case("control", "skrl.DeterministicMixin", skrl),
    model_case("control", "pfrl.MLP", lambda: pfrl("MLP")),
    model_case("control", "pfrl.DuelingDQN", lambda: pfrl("DuelingDQN")),
]  # fmt: skip
