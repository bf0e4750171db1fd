"""Bundles as models with versions, which are loaded, tested, replaced and closed while requests arrive."""
