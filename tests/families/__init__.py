"""Every causal language model that transformers has, from pages as examples/causal_lm.py serves it, beside `generate`."""
