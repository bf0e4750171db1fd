"""Our verdicts and PyTorch's own, over a corpus of small models.

case             a model, its inputs, and the rules that it breaks
corpus           all cases; corpus_* are its rooms, by kind
cgcompile_says   our verdict
pytorch_says     PyTorch's
compare          the two side by side, and the table
differences      where they differ, and why
settings         what holds while a case is asked about
"""
