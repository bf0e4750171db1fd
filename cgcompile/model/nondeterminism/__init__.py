"""What a call takes that is no input: numbers that Python and NumPy draw, the time, memory that nothing wrote.
Eager PyTorch gives another result at every call; a program has the one of its export for ever.
"""
