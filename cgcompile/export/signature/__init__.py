"""The signature of an exported model (`signature`), output sizes found from eager PyTorch (`output_sizes`), and ranges of inputs
that are indices (`index_ranges`)."""
