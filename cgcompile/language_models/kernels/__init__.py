"""Kernels for GPUs in Triton, and the same with PyTorch's operations."""
