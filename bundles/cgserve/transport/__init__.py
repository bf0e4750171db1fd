"""What clients may do, bounded: sockets, connections and bodies."""
