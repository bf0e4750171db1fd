"""What the nodes and memories of a bundle are called and where they lie, as text and as DOT.
For `inspect` and its page.
"""
