"""Batches requests: a bounded queue, token sequences grouped by length, and statistics of their time."""
