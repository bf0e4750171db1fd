"""Models that several tests build, and how their bundles are driven beside eager PyTorch."""
