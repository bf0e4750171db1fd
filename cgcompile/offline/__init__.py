"""The trace recorder: recordings for a GPU that is not here.
Decompose, lower with Inductor, compile, plan the arena, assemble rows, prove them in an interpreter.
"""
