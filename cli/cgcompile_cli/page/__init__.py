"""`inspect --html`: one self-contained page about a bundle, with its style sheet and its script."""
