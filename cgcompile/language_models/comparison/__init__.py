"""Whether a model gives over pages the text that transformers gives: what is asked of it before a build."""
