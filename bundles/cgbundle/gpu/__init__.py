"""Sessions of a cuda bundle on a GPU, imported for such bundles only."""
