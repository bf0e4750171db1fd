"""The partitioner: an exported program and the nodes that must run on the host -> as few alternating regions as possible.

    components, cuts            the order and the cuts, for operations that are only numbers and kinds (no torch)
    node_kinds                  what a node of the program is
    dependencies, writes        what depends on what, and which operations writes to memory tie together
    split                       an exported program and placements -> Partition
    symbolic_sizes              export's symbols at the sizes of an int_key
    region_modules, isolated    one module per region at one int_key, and the same sharing no memory
    crossing                    what is copied between the regions, and sentences for findings

Importing this package, `components` or `cuts` imports no torch.
"""
