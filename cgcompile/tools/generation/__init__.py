"""A benchmark of generation: a bundle with a paged cache, as examples/causal_lm.py builds it, beside `generate` of transformers."""
