"""The partitioner: splits an exported program into as few alternating graph and host regions as possible.

    components, cuts            the order of the operations and the regions, from numbers and kinds alone (no torch)
    node_kinds                  the kind of each node of the program
    dependencies, writes        which operations depend on others, and which ones writes to memory keep together
    split                       an exported program and placements -> Partition
    symbolic_sizes              the values of export's symbols at the sizes of an int_key
    region_modules, isolated    one module per region at one int_key; `isolated`: modules that share no memory
    crossing                    the values that are copied between regions, and sentences for findings

Importing this package, `components` or `cuts` imports no torch.
"""
