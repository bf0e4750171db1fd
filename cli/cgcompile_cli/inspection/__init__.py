"""Names and addresses of a bundle's nodes and memories, for `inspect` and its page."""
