"""Graphs that another program captured, saved: what two processes of it recorded becomes a bundle for `cgbundle.attach`."""
