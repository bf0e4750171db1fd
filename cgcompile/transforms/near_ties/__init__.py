"""Indices that point at floats: a compiled program is right when it picks another one whose float is equal within tolerance.

What follows from such a choice is compared with eager PyTorch that made the same choice."""
