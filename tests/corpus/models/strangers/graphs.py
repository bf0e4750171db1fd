"""Graphs, molecules, point clouds and equivariant networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...case import Case, Made
from ..shared import noise
from .stranger import model_case, stranger

NODES = {"nodes": (6, 15)}
FEATURES = 8


def graph(nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws features of nodes, and three edges per node."""
    return torch.randn(nodes, FEATURES), torch.randint(0, nodes, (2, 3 * nodes))


def geometric(name: str, **options: Any) -> Case:
    """A network of torch_geometric by its name."""
    options = {"in_channels": FEATURES, "hidden_channels": 16, "num_layers": 2, "out_channels": 4, **options}
    return stranger("graphs", f"torch_geometric.nn:{name}", inputs=graph, sizes=NODES, **options)


class Layers(nn.Module):
    """Two layers of torch_geometric, from features to classes."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Returns the scores of the nodes."""
        return self.second(self.first(x, edge_index).relu(), edge_index)


def layers(name: str, **options: Any) -> Case:
    """Two layers of one kind."""

    def make() -> Made:
        import torch_geometric.nn

        kind = getattr(torch_geometric.nn, name)
        return Layers(kind(FEATURES, 16, **options), kind(16, 4, **options)), graph

    return model_case("graphs", f"torch_geometric.{name}", make, sizes=NODES)


class Pooled(nn.Module):
    """Classifies whole graphs, as in torch_geometric's tutorial."""

    def __init__(self, convolution: nn.Module, pool: Any) -> None:
        super().__init__()
        self.convolution, self.pool, self.head = convolution, pool, nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Scores three graphs whose nodes lie one after the other."""
        return self.head(self.pool(self.convolution(x, edge_index).relu(), batch))


def pooled(size: int | None) -> Made:
    """Mean pooling over each graph; `size` is the argument with the number of graphs."""
    from torch_geometric.nn import SAGEConv, global_mean_pool

    def pool(x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return global_mean_pool(x, batch, size=size)

    def inputs(nodes: int) -> tuple[torch.Tensor, ...]:
        return *graph(nodes), torch.arange(nodes) * 3 // nodes

    return Pooled(SAGEConv(FEATURES, 16), pool if size else global_mean_pool), inputs


def light_gcn() -> Made:
    """LightGCN, which scores pairs of users and items."""
    from torch_geometric.nn import LightGCN

    return LightGCN(num_nodes=20, embedding_dim=8, num_layers=2), lambda edges: (torch.randint(0, 20, (2, edges)),)


def schnet() -> Made:
    """SchNet with given edges, because radius_graph needs another package."""
    from torch_geometric.nn import SchNet

    class Given(nn.Module):
        def forward(self, pos: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            index = torch.arange(pos.size(0))
            edges = torch.cartesian_prod(index, index).t()
            return edges, (pos[edges[0]] - pos[edges[1]]).pow(2).sum(-1).add(1e-6).sqrt()

    def inputs(nodes: int) -> tuple[torch.Tensor, ...]:
        return torch.randint(1, 9, (nodes,)), torch.randn(nodes, 3)

    return SchNet(hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8, interaction_graph=Given()), inputs


def egnn_network(batch: int) -> tuple[torch.Tensor, ...]:
    """Draws atom types and positions."""
    return torch.randint(0, 9, (batch, 7)), torch.randn(batch, 7, 3)


def se3(batch: int) -> dict[str, torch.Tensor]:
    """Draws features of atoms, positions, and a mask of valid atoms."""
    return {
        "feats": torch.randn(batch, 6, 8), "coors": torch.randn(batch, 6, 3),
        "mask": torch.ones(batch, 6, dtype=torch.bool), "return_type": 0,
    }  # fmt: skip


def equiformer(batch: int) -> tuple[torch.Tensor, ...]:
    """Draws atom types, positions, and a mask of valid atoms."""
    return torch.randint(0, 9, (batch, 7)), torch.randn(batch, 7, 3), torch.ones(batch, 7, dtype=torch.bool)


def tensor_product() -> Made:
    """A tensor product of vectors with spherical harmonics, whose weights a network computes: a convolution of e3nn's guide."""
    from e3nn import nn as e3nn_nn
    from e3nn import o3

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.harmonics = o3.Irreps.spherical_harmonics(2)
            self.product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", self.harmonics, "4x0e + 2x1o", shared_weights=False)
            self.net = e3nn_nn.FullyConnectedNet([4, 16, self.product.weight_numel], torch.relu)

        def forward(self, features: torch.Tensor, positions: torch.Tensor, radial: torch.Tensor) -> torch.Tensor:
            harmonics = o3.spherical_harmonics(self.harmonics, positions, normalize=True, normalization="component")
            return self.product(features, harmonics, self.net(radial))

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(batch, 10), torch.randn(batch, 3), torch.randn(batch, 4)

    return Convolution(), inputs


def gate() -> Made:
    """A linear map and a gate of e3nn."""
    from e3nn import nn as e3nn_nn
    from e3nn import o3

    activation = e3nn_nn.Gate("4x0e", [torch.relu], "2x0e", [torch.sigmoid], "2x1o")
    return nn.Sequential(o3.Linear("4x0e + 2x1o", activation.irreps_in), activation), lambda batch: (torch.randn(batch, 10),)


def ani() -> Made:
    """The energy of water by an untrained network of torchani."""
    from torchani.arch import simple_ani

    model = simple_ani(("H", "C", "N", "O"), lot="wb97x-631gd")

    class Energies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, species: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
            return self.model((species, coordinates)).energies

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        water = torch.tensor([[0.0, 0.0, 0.1], [0.0, 0.8, -0.5], [0.0, -0.8, -0.5]])
        return torch.tensor([[8, 1, 1]]).expand(batch, 3).contiguous(), water + 0.05 * torch.randn(batch, 3, 3)

    return Energies(), inputs


def forces() -> Made:
    """The forces on the atoms: the derivative of the energy, as in torchani's documentation."""
    energies, inputs = ani()

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energies = energies

        def forward(self, species: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                coordinates = coordinates.detach().requires_grad_()
                return -torch.autograd.grad(self.energies(species, coordinates).sum(), coordinates)[0]

    return Forces(), inputs


def point_net() -> Made:
    """PointNet, which classifies clouds of 32 points."""
    from pointnet.pointnet import STN, PointNetCls

    return PointNetCls(3, 4, stn_3d=STN(in_dim=3)), lambda batch: (torch.randn(batch, 3, 32),)


def point_net_2() -> Made:
    """PointNet++, which groups points around farthest-point samples."""
    from pointnet import PointNet2ClsSSG

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        points = torch.rand(batch, 3, 24)
        return points, points.clone()

    return PointNet2ClsSSG(3, 4, downsample_points=(12, 6), radii=(0.3, 0.6), ks=(4, 4)), inputs


CASES = [
    *[geometric(name) for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")],
    geometric("PNA", aggregators=["mean", "max", "std"], scalers=["identity", "attenuation"], deg=torch.tensor([0, 2, 5, 3])),
    stranger("graphs", "torch_geometric.nn:SGFormer", inputs=lambda nodes: (*graph(nodes), torch.arange(nodes) * 2 // nodes),
        sizes=NODES, in_channels=FEATURES, hidden_channels=16, out_channels=4, trans_num_layers=1, gnn_num_layers=1),
    layers("ChebConv", K=2),
    layers("TransformerConv"),
    layers("GATv2Conv", edge_dim=None),
    layers("ARMAConv"),
    model_case("graphs", "torch_geometric.global_mean_pool", lambda: pooled(None), sizes=NODES),
    model_case("graphs", "torch_geometric.global_mean_pool_size", lambda: pooled(3), sizes=NODES),
    model_case("graphs", "torch_geometric.LightGCN", light_gcn, sizes={"edges": (5, 12)}),
    model_case("molecules", "torch_geometric.SchNet", schnet, sizes={"nodes": (4, 7)}),
    stranger("molecules", "egnn_pytorch:EGNN_Network", inputs=egnn_network, num_tokens=9, num_positions=7, dim=16, depth=2,
        num_nearest_neighbors=3),
    stranger("molecules", "egnn_pytorch:EGNN", noise(7, 16), noise(7, 3), dim=16),
    stranger("molecules", "se3_transformer_pytorch:SE3Transformer", inputs=se3, dim=8, heads=2, depth=1, dim_head=4,
        num_degrees=2, valid_radius=10),
    stranger("molecules", "equiformer_pytorch:Equiformer", inputs=equiformer, num_tokens=9, dim=(8, 4), dim_head=(4, 4),
        heads=(2, 2), num_degrees=2, depth=1, attend_self=True, reduce_dim_out=True, num_neighbors=3),
    model_case("molecules", "torchani.ANI", ani),
    model_case("molecules", "torchani.Forces", forces),
    model_case("equivariant", "e3nn.FullyConnectedTensorProduct", tensor_product),
    model_case("equivariant", "e3nn.Gate", gate),
    stranger("points", "point_transformer_pytorch:PointTransformerLayer", noise(9, 16), noise(9, 3), dim=16,
        pos_mlp_hidden_dim=16, attn_mlp_hidden_mult=2),
    model_case("points", "pointnet.PointNetCls", point_net),
    model_case("points", "pointnet.PointNet2ClsSSG", point_net_2),
    stranger("points", "egnn_pytorch:EGNN", noise(9, 8), noise(9, 3), variant="EGNN_edges", dim=8, m_dim=8, soft_edges=True),
]  # fmt: skip
