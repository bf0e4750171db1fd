"""Random small modules that keep attributes between calls, and sequences of calls: bundles are compared with eager PyTorch."""
