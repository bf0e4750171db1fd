"""Drivers for tests without a GPU: fake drivers, PTX run on the CPU, and calls of the CUDA backend."""
