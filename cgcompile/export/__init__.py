"""torch.export with the declared dimensions dynamic, over flat tensors.
The exported program, its signature, and the names of its weights.
"""
