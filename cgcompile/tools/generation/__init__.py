"""Compares how fast a bundle of `cgcompile build FOLDER` generates text with how fast `generate` of transformers does."""
