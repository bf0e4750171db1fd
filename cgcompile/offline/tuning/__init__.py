"""Chooses the configurations of matrix products and convolutions, by measurements on the architecture or by a cost model."""
