"""Bundles as models with versions: loaded, examined, exchanged and closed while requests come."""
