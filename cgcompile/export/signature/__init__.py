"""The signature of an exported model (`signature`), output sizes found from eager PyTorch (`output_sizes`), ranges of inputs
that are indices (`index_ranges`), and lines of the model that fix a size (`fixed_sizes`)."""
