"""Collectives between the GPUs of one host, as kernels that a graph can hold: their memory, their text, their launches."""
