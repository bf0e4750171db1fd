"""What the user's code does to Python while torch.export traces it, and what it is told meanwhile: attributes that it changes
(`attributes`, `attribute_reads`), tensors that are no buffers (`held_tensors`), conversions that change nothing (`conversions`),
and whether it is traced at all (`questions`)."""
