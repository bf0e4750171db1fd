"""Writes bundles (programs, recordings, self-test, manifest), and verifies them in a fresh process (`proof`).  No other code writes
the format."""
