"""The user's model: how it is loaded, its declared sizes, its inputs and outputs as pytrees, and how eager PyTorch runs it.

The package also finds the effects of a call that are not operations.
"""
