"""`cgcompile serve` from a wheel, asked by clients that others wrote: `build` makes bundles and PyTorch's answers."""
