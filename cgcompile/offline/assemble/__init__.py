"""Builds recordings from launches and kernel images."""
