"""The files and the manifest of a bundle, its exam, its provenance, and the proof in a fresh process.
The only writer of the format.
"""
