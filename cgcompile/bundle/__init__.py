"""Writes bundles (programs, self-test, manifest), and verifies them in a fresh process.  No other code writes the format."""
