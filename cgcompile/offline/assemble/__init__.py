"""Builds the rows of a bundle from launches and images: merges regions, plans the arena, packs parameter blocks, checks plans."""
