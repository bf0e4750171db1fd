"""Mutation testing of the code that validates bundles and runs calls: `python -m tests.mutants`."""
