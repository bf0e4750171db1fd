"""What causal_lm.py is made of: pages of keys and values, attention over them, sampling, weights of eight bits, configurations."""
