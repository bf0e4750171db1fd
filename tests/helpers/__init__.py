"""Shared test helpers: models, handmade bundles, fake drivers, paths, error checks and the import graph."""
