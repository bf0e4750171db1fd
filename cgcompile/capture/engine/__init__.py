"""Saves graphs that another program captured: recordings of two of its processes become a bundle for `cgbundle.attach`."""
