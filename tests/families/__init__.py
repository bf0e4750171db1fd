"""Every causal language model that transformers has, from pages as `cgcompile build FOLDER` makes it, beside `generate`."""
