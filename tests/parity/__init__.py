"""Compares cgcompile's verdicts with PyTorch's, over a corpus of small models.

case             a model, its inputs, and the rules that it breaks
corpus           all cases; its modules are groups of cases by kind
cgcompile_says   cgcompile's verdict
pytorch_says     PyTorch's verdict
compare          both verdicts, and the table
differences      the known differences between the verdicts, with reasons
settings         torch's settings while a case is judged
"""
