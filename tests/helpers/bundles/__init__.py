"""Bundles that tests write by hand, without a build, and the parts of these bundles."""
