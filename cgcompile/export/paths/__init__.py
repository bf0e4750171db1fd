"""Programs of models whose Python asks tensors for their truth: every way is exported, and the ways are joined as branches."""
