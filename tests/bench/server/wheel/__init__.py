"""Tests `cgcompile serve` from a wheel with third-party clients; `build` makes bundles and PyTorch's answers."""
