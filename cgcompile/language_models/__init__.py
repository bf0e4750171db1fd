"""Language models of transformers as models for a bundle: from a folder in the Hub's layout, or by hand."""
