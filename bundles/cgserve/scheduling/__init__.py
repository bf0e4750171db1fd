"""Selects the requests of the next call, and assigns pages of the cache."""
