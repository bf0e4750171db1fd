"""Every invariant of a bundle: the compiler checks before it publishes, the loader before it runs.
One file per part of the manifest.
"""
