"""Bundles made by hand, without a build, and what they are made of."""
