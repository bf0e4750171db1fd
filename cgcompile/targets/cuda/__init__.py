"""What both recorders of a cuda target share: memory layout, lowering levels, host regions, steps, kernel images."""
