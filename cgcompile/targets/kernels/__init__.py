"""Kernels of our own, as PTX, and the ptxas that assembles them for an architecture."""
