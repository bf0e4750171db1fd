"""Launches and images become rows: merged regions, a planned arena, parameter blocks.
Every plan is derived again by a second function.
"""
