"""Weights on their way: from files to the memory that calls read them from, and new ones in place of those."""
