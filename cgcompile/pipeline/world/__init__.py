"""Builds a model on several devices: one process builds each rank, and the results become one bundle."""
