"""Limits for clients: sockets, connections and bodies."""
