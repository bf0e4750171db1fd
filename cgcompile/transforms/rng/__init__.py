"""Replaces random operators by arithmetic over a counter-based generator whose state is a buffer of the program.
Every replay draws new numbers, and the program determines which.
"""
