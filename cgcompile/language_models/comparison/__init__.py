"""Checks before a build that a model over pages gives the same text as transformers."""
