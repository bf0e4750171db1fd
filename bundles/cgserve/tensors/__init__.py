"""Entries of bundles as models of the Open Inference Protocol."""
