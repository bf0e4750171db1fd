"""An exported program becomes a graph of operations that Inductor has Triton kernels for.
One rewrite a file.
"""
