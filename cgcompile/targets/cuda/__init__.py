"""Code that both recorders for GPUs share: lowering levels, host regions, steps, and the bundle's files."""
