"""The user's model: where it comes from, its declared sizes, its inputs and outputs as pytrees.
Also how eager PyTorch runs it, and what a call of it does beside its operations.
"""
