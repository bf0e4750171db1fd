"""Builds recordings from launches and kernel images: merges regions, plans the arena, packs parameter blocks, checks plans."""
