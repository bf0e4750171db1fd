"""Embedding models, rerankers and classifiers: text to vectors, scores and classes."""
