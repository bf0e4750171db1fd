"""What the user's code does in Python while torch.export traces it, and what it sees meanwhile.

`attributes` and `attribute_reads` find attributes that it changes, `held_tensors` finds tensors that are not buffers.
`conversions` skips conversions that change nothing.  `questions` hides that the code is traced.  `constant_expressions` evaluates
values of constants.  `way` follows one path through its branches on data: `predicates` and `tracked_numbers` are the conditions,
`python_state` and `bytecode` the state of Python at a branch.
"""
