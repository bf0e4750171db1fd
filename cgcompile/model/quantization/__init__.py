"""Quantized modules in terms of plain tensors: subclasses of tensors become their inner tensors, packed weights int8 ones.
`plain_model` is the whole of it.
"""
