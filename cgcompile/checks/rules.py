"""The table of all rules.

To add a rule, write a function of a RuleContext in the file of its group, and list it in RULES.  It yields the results of
`context.finding`.  The function `mutated_buffer` is the rule "mutated-buffer".  The docstring needs the paragraphs "What it looks
for", "Why", "Effect", "Fix" and "Source", from which `make docs` writes the page of findings.  A finding of severity HOST moves its
node to the host.  Nodes are those of torch.export before decomposition: `x.double()` is aten.to, not aten._to_copy.  Add a model
for which the rule yields a finding to CASES in tests/cpu/checks/test_checks.py, and test one for which it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cgbundle.format.schema import Finding

from . import collectives, control, devices, operators, randomness, repeatability, scalars, shapes, sizes, writes
from .context import RuleContext

Rule = Callable[[RuleContext], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    writes.mutated_attribute,
    writes.mutated_buffer,
    writes.mutated_input,
    randomness.random_operation,
    randomness.rng_state_operation,
    repeatability.python_random,
    repeatability.clock_read,
    repeatability.unrepeatable_result,
    repeatability.earlier_calls,
    scalars.data_dependent_branch,
    scalars.host_scalar,
    shapes.data_dependent_shape,
    shapes.data_dependent_select,
    devices.device_copy,
    devices.cpu_operation,
    devices.several_devices,
    control.control_flow,
    collectives.unknown_collective,
    operators.boolean_index_put,
    operators.incompatible_operator,
    operators.sparse_output,
    operators.deterministic_scatter,
    operators.cudagraph_unsafe,
    operators.fallback_op,
    operators.custom_operator,
    operators.quantized_weights,
    devices.pinned_memory,
    devices.moved_to_gpu,
    devices.wrapped_module,
    scalars.assert_scalar,
    scalars.asserted_value,
    scalars.baked_weight,
    scalars.path,
    scalars.tensor_assertion,
    writes.overlapping_input,
    writes.aliased_output,
    sizes.non_tensor_input,
    repeatability.outside_effect,
    randomness.training_mode,
)
"""Rules that refuse come first, because a build reports the first finding."""


def name(rule: Rule) -> str:
    """Returns the name of a rule for --allow, such as `mutated-buffer`."""
    return rule.__name__.replace("_", "-")
