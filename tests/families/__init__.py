"""Compares every causal language model of transformers, with the paged attention of `cgcompile build FOLDER`, with `generate`."""
