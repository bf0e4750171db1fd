"""Replaces random operators by arithmetic over a counter-based generator whose state is a buffer of the program.  Every replay
draws new numbers, which depend only on the seed and the number of earlier calls.  `rewrite` adds the buffer, int64 [seed, calls so
far].  At run time `Program.seed` writes it (cgbundle/program/state.py).  Sampling of language models takes its seeds as an input
instead (language_models/sampling.py).
"""
