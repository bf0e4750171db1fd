"""Chooses the configurations of products and convolutions, by measurements on the architecture or by a cost model."""
