"""Exports a model with torch.export.  The program takes and returns flat tensors; declared dimensions are dynamic.
Also finds the program's signature, and the names of its weights.
"""
