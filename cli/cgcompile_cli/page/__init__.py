"""`inspect --html`: one self-contained page about a bundle, with style sheet and script."""
