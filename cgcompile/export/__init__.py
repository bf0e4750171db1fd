"""Exports a model with torch.export.  The program takes and returns flat tensors, and the declared dimensions are dynamic.
The package also has the program's signature and the names of its weights.
"""
