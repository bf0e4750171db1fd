"""Rewrites an exported program to operations that Inductor has Triton kernels for; one rewrite per file."""
