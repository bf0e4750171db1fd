"""Devices of the model and its tensors: `placing` moves the model, `tracking` follows moves in the user's code (with
`tensor_places`, `operations`, `moves` and `data_reads`), and `markers` are the operators for moves in a graph."""
