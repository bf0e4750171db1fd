"""Splits a model by layers over several devices."""
