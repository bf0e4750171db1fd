"""An exported program becomes a graph of operations that Inductor has Triton kernels for, one rewrite a file."""
