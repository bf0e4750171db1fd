"""Values that a call uses and that are not inputs: random numbers of Python and NumPy, the time, uninitialized memory.

Eager PyTorch returns different results with them.  An exported program always has the values of its export.
"""
