"""Models that several tests build, and checks of their bundles against eager PyTorch."""
