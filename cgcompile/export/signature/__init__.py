"""The signature of an exported model (`signature`), sizes of outputs where export has no name for them (`output_sizes`), and inputs
that are indices (`index_ranges`)."""
