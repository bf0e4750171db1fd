"""Inductor for a GPU that is not here: a fake device, and the launches of the wrapper that Inductor writes.
Runs in worker processes.
"""
