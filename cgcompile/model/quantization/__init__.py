"""Converts quantized modules to plain tensors: tensor subclasses to their inner tensors, packed weights to int8 (`plain_model`)."""
