"""Tensors of the caller's library (NumPy, torch, CuPy, DLPack) without importing it, and a tensor of our own."""
