"""Triton kernels for GPUs, and the same functions with PyTorch's operations."""
