"""Runs every causal language model of transformers with the paged attention of `cgcompile build FOLDER`. Compares the texts with
`generate`."""
