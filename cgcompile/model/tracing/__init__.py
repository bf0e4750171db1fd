"""What the user's Python code does while torch.export traces it, and which values it gets.

`attributes` and `attribute_reads` find attributes that the code changes.  `held_tensors` finds tensors that are not buffers.
`conversions` skips conversions that change nothing.  `questions` hides that the code is traced.  `constant_expressions` evaluates
expressions of constants.  `way` follows one path through the code's branches on data.  `predicates` and `tracked_numbers` handle
the conditions of these branches.  `python_state` and `bytecode` describe the state of Python at a branch.
"""
