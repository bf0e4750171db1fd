"""What the nodes and memories of a bundle are called and where they lie: for `inspect` and its page."""
