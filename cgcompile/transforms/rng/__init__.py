"""Random operators become arithmetic over a counter-based generator whose state is a buffer.
A replay then draws new numbers, and the program says which.
"""
