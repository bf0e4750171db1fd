"""Models that others published, built for every target and compared with eager PyTorch: `python -m tests.corpus --help`."""
