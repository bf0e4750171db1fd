"""Compiles Inductor's Triton kernels to cubins for an architecture in worker processes.  Caches the cubins by content."""
