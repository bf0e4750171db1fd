"""The documentation: its reference is written from the code, its links are followed, its blocks are run."""
