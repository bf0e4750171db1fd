"""A GPU where there is none: fake drivers, PTX run on the CPU; and calls of the backend that they stand for."""
