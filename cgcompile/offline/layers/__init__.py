"""Splits a model by layers over several devices: assigns operations to devices, and cuts out the program of one device."""
