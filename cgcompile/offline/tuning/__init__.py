"""Chooses the configurations of matrix products and convolutions."""
