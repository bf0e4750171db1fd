"""Embedding models, rerankers and classifiers: texts in, vectors, scores and classes out."""
