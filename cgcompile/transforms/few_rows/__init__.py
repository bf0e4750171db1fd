"""Rewrites operations with few rows to operations for which Inductor has faster kernels, or fewer."""
