"""Makes models that a build accepts from language models of transformers: from a folder in the Hub's layout, or from a network."""
