"""Transforms of programs and proofs about them: random numbers, padding, outputs that share memory, custom operators on the
host."""
