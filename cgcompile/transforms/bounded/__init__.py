"""Computes outputs of data-dependent size at a fixed size: padded to a bound, with the true sizes as further outputs."""
