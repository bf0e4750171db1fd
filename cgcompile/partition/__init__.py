"""The partitioner: splits an exported program into as few alternating graph and host regions as possible.

    components, cuts            the order of the operations and the regions, from numbers and kinds alone (no torch)
    node_kinds                  the kind of each node of the program
    dependencies, writes        which operations depend on others, and which must share a region because of writes to memory
    split                       an exported program and placements -> Partition
    symbolic_sizes              the values of export's symbols at the sizes of an int_key
    region_modules, isolated    one module per region at one int_key; `isolated`: modules that share no memory
    crossing                    the values that are copied between regions, and sentences for findings
    blocks, switches            the straight parts, branches and loops of a region; `layers` cuts it between equal layers

Importing this package, `components` or `cuts` imports no torch.
"""
