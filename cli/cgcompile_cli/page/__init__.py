"""`inspect --html`: one self-contained page about a bundle.
HTML by construction, with the style sheet and the script beside it.
"""
