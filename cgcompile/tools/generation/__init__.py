"""A benchmark of generation: a bundle of `cgcompile build FOLDER`, with a paged cache, beside `generate` of transformers."""
