"""What the user's code does to Python while torch.export traces it, and what it is told meanwhile: attributes that it changes
(`attributes`, `attribute_reads`), tensors that are no buffers (`held_tensors`), conversions that change nothing (`conversions`),
whether it is traced at all (`questions`), what follows from constants (`constant_expressions`), and one way through its branches on
data (`way`): what it asks (`predicates`, `tracked_numbers`), and what Python keeps where it asks (`python_state`, `bytecode`)."""
