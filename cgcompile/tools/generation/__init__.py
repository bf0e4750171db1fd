"""Benchmarks generation: a bundle of `cgcompile build FOLDER`, with a paged cache, against `generate` of transformers."""
