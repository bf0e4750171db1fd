"""Paths through a model's Python: the questions that it asks tensors, the answers, and the state of Python at each question."""
