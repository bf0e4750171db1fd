"""Outputs whose sizes depend on data, computed at fixed sizes: padded to a bound, with the true sizes as further outputs."""
