"""Selected indices that differ from eager PyTorch's are right if the floats at both indices are equal within tolerance.

The other results are compared with an eager PyTorch run that makes the same choices."""
