"""Computes tensors whose sizes depend on data at a fixed upper bound: padded tensors with a count of their valid elements."""
