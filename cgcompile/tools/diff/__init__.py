"""diff: compares two bundles by their files, without a GPU and without torch.

Machine, source and time of a build are ignored, and so are bytes of kernel parameters that no kernel reads.  So two builds of one
model with the same versions and options do not differ.  All other differences are reported, also in fields that a later version of
the format adds.
"""
