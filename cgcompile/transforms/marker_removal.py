"""Removes the marker operators (model/devices/markers.py), for targets that do not split programs into regions."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from ..export.torch_program import copied_graph, with_graph
from ..model.devices.markers import marker


def without_markers(program: ExportedProgram) -> ExportedProgram:
    """Returns `program` without the marker operators, which are identities, or `program` itself if it has none.  All other nodes
    keep their names and metadata.  Weights are shared, not copied.  The result can be saved and loaded without cgcompile."""
    if not any(marker(node) for module in _modules(program.graph_module) for node in module.graph.nodes):
        return program
    root = copied_graph(program)
    renamed = _drop(root)
    for module in _modules(root):
        if module is not root:
            _drop(module)
    return with_graph(program, root, renamed)


def _modules(module: GraphModule) -> list[GraphModule]:
    return [submodule for submodule in module.modules() if isinstance(submodule, GraphModule)]


def _drop(module: GraphModule) -> dict[str, str]:
    """Removes the markers from `module`'s graph.  Returns marker name -> name of the node that replaces it."""
    renamed: dict[str, str] = {}
    for node in [node for node in module.graph.nodes if marker(node)]:
        source = node.args[0]
        assert isinstance(source, Node)
        renamed[node.name] = renamed.get(source.name, source.name)
        node.replace_all_uses_with(source)
        module.graph.erase_node(node)
    module.recompile()
    return renamed
