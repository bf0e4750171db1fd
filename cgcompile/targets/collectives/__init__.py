"""Collectives between the GPUs of one host, as kernels that a CUDA graph can contain: memory, PTX text, launches."""
