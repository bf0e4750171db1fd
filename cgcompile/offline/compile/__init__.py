"""Kernels as Inductor wrote them become cubins for the named architecture, by Triton in worker processes; kept by content."""
