"""Inductor's choices handler: selects one configuration for each Triton template of a matrix product or convolution.

Private interfaces (torch 2.11, 2.13): `V.set_choices_handler` takes a subclass of `InductorChoices`; `bmm_template`,
`ExternKernelChoice`, and `KernelTemplateChoice` with its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor.kernel.bmm import bmm_template
from torch._inductor.select_algorithm import ExternKernelChoice
from torch._inductor.virtualized import V

from ...errors import ModelError
from ...targets.architectures import Arch
from ...transforms.few_rows.row_blocks import RowBlocks
from ..tuning.cost_model import Candidate, Problem
from .variants import Configuration

Choose = Callable[[Problem, Sequence[Candidate], Arch], tuple[int, str]]
"""See `cost_model.choose`."""

More = Callable[[Problem], Sequence[Candidate]]
"""Returns configurations of a problem that may be chosen besides Inductor's."""


def nothing_more(problem: Problem) -> Sequence[Candidate]:
    return ()


class TemplateConfigs(RowBlocks):
    """Inductor's choices, reduced to one configuration for each template.  `selected`: how each configuration was chosen."""

    def __init__(self, arch: Arch, choose: Choose, more: More) -> None:
        super().__init__()
        self._arch = arch
        self._choose = choose
        self._more = more
        self.selected: dict[Configuration, str] = {}

    def get_template_configs(self, kernel_inputs: Any, templates: Any, op_name: str, *args: Any, **kwargs: Any) -> Any:
        """Adds a template for a `bmm` whose result has another dtype than the factors, for which torch 2.11 has none."""
        if op_name == "bmm" and not templates:
            templates = [bmm_template]
        return super().get_template_configs(kernel_inputs, templates, op_name, *args, **kwargs)

    def _finalize_template_configs(self, template_choices: Any, kernel_inputs: Any, *args: Any, **kwargs: Any) -> list[Any]:
        offered = [choice for choices in template_choices.values() for choice in choices]
        offered = [choice for choice in offered if not isinstance(choice.template, ExternKernelChoice)]
        described = [_candidate(choice.params.to_kwargs()) for choice in offered]
        if not offered:
            return []
        m, n, k = [int(size) for size in kernel_inputs.mnk_symbolic()]
        shape = [int(size) for size in kernel_inputs.output_layout().size]
        problem = Problem(
            kind=args[1] if len(args) > 1 else kwargs["op_name"],
            batch=shape[0] if len(shape) == 3 else 1,
            m=m,
            n=n,
            k=k,
            dtype=str(kernel_inputs.dtype()).removeprefix("torch."),
            arch=self._arch.name,
        )
        picked = self._pick(problem, described)
        return [offered[described.index(picked)] if picked in described else _with_candidate(offered[0], picked, k)]

    def get_conv_configs(self, device_type: str | None = "cuda") -> Any:
        """Inductor's function for configurations of a convolution, reduced to one."""
        configs = super().get_conv_configs(device_type)

        def picked_config(m: Any, n: Any, k: Any, **kwargs: Any) -> list[Any]:
            offered = list(configs(m, n, k, **kwargs))
            settings = [{**config.kwargs, "num_stages": config.num_stages, "num_warps": config.num_warps} for config in offered]
            described = [_candidate(setting) for setting in settings]
            picked = self._pick(_convolution(V.graph.current_node, self._arch), described)
            if picked in described:
                return [offered[described.index(picked)]]
            kwargs = {**offered[0].kwargs, **_blocks(picked)}
            return [type(offered[0])(kwargs, num_stages=picked.stages, num_warps=picked.warps)]

        return picked_config

    def _pick(self, problem: Problem, offered: Sequence[Candidate]) -> Candidate:
        candidates = list(dict.fromkeys([*offered, *self._more(problem)]))
        try:
            index, method = self._choose(problem, candidates, self._arch)
        except ValueError as error:
            raise ModelError("operator-without-kernel", str(error)) from error
        picked = candidates[index]
        self.selected[picked.block_m, picked.block_n, picked.block_k, picked.stages, picked.warps] = method
        return picked


def _with_candidate(choice: Any, candidate: Candidate, k: int) -> Any:
    """Copies a template choice with another configuration.  k: the length of the inner axis."""
    parameters = choice.params.to_kwargs()
    changes = {
        **_blocks(candidate),
        "num_stages": candidate.stages,
        "num_warps": candidate.warps,
        "EVEN_K": k % candidate.block_k == 0,
    }
    settings = {**parameters, **{name: value for name, value in changes.items() if name in parameters}, "GROUP_M": candidate.group}
    return type(choice)(
        template=choice.template, params=type(choice.params)(settings), extra_kwargs=choice.extra_kwargs,
        layout=choice.layout, inputs=choice.inputs,
    )  # fmt: skip


def _blocks(candidate: Candidate) -> dict[str, int]:
    return {"BLOCK_M": candidate.block_m, "BLOCK_N": candidate.block_n, "BLOCK_K": candidate.block_k}


def _candidate(settings: Mapping[str, Any]) -> Candidate:
    return Candidate(
        block_m=settings["BLOCK_M"],
        block_n=settings["BLOCK_N"],
        block_k=settings["BLOCK_K"],
        stages=settings["num_stages"],
        warps=settings["num_warps"],
        group=settings.get("GROUP_M", 0),
    )


def _convolution(node: torch.fx.Node, arch: Arch) -> Problem:
    weight, out, groups = node.args[1].meta["val"], node.meta["val"], node.args[8]
    return Problem(
        kind="conv",
        batch=groups,
        m=out.numel() // out.shape[1],
        n=out.shape[1] // groups,
        k=weight.numel() // weight.shape[0],
        dtype=str(out.dtype).removeprefix("torch."),
        arch=arch.name,
    )
