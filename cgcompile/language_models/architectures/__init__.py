"""Models that are more or other than layers with paged attention: their cache by lane, their states, their text half, and
LoRA adapters over them."""
