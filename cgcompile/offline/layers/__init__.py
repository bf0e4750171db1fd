"""A model split by layers over several devices: which of them computes an operation, and the share that each one's program is."""
