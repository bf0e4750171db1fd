"""Who made a bundle: signatures over its manifest, and the keys they are checked with."""
