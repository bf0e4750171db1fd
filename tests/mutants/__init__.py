"""Mutation testing of what decides whether a bundle is sound and what a call does: `python -m tests.mutants`."""
