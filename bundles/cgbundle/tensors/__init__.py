"""Tensors of the caller's library (NumPy, torch, CuPy, DLPack) without importing it, and the runtime's own tensor."""
