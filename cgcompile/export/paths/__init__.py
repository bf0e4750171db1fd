"""Programs of models whose Python asks tensors for their truth: every way is exported, and the ways are joined as branches."""

MAX_PATHS = 64
"""Ways through a model's Python that are exported at most, unless the caller says otherwise: each costs an export."""
