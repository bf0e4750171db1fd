"""The signature of an exported model (`signature`), output sizes from eager PyTorch (`output_sizes`), ranges of inputs that are
indices (`index_ranges`), and lines of the model that make a size constant (`constant_sizes`)."""
