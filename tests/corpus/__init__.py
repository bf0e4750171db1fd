"""Third-party models, built for every target and compared with eager PyTorch: `python -m tests.corpus --help`."""
