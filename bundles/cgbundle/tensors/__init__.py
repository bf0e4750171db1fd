"""Tensors of the caller's library (NumPy, torch, CuPy, DLPack) without importing it.
And a tensor of our own where there is none.
"""
