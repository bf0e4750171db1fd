"""The CUDA driver alone: a context, memory, weights on their way, kernels, and recordings made runnable."""
