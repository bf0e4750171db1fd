"""PyTorch's samples of its operators, built and compared: `python -m tests.operators`."""
