"""The trace recorder: recordings for a GPU that is not there.

Everything is lowered to Triton and compiled for the named architecture; the launches of Inductor's own wrapper are written down,
every argument typed, memory planned by us, and proved by Triton's interpreter.
"""
