"""Launches and images become rows: merged regions, a planned arena, parameter blocks.  A second function checks every plan."""
