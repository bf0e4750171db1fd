"""Writes bundles: program, self-test and manifest, and the verification in a fresh process.  No other code writes the format."""
