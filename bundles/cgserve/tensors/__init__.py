"""Entries of bundles as the Open Inference Protocol knows them."""
