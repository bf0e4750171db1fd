"""diff: compares two bundles by their files, without a GPU and without torch.

Place and time of a build are ignored, and so are bytes of parameters that no kernel reads.  So two builds of one model with the
same versions and options do not differ.  Everything else counts, also fields that a later version of the format adds.
"""
