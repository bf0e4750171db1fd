"""Compiles Inductor's kernels to cubins for an architecture with Triton in worker processes; caches them by content."""
