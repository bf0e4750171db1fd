"""Makes models for a bundle from language models of transformers: from a folder in the Hub's layout, or by hand."""
