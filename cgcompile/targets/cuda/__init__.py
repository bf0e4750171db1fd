"""Code that both recorders of a cuda target share: lowering levels, host regions, steps, and the bundle's files."""
