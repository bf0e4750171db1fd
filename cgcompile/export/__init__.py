"""Exports a model with torch.export over flat tensors, with the declared dimensions dynamic.
Has the exported program, its signature, and the names of its weights.
"""
