"""Transforms of programs, and proofs about programs: random numbers, padding, outputs that share memory, custom operators of host
regions.
"""
