"""diff: what differs between two bundles, from their files alone: no GPU, no torch.

Two builds of one model with the same versions and options do not differ: where and when a bundle was built is left out, and so are
bytes of parameters that no kernel reads.  Everything else counts, also what a later version of the format adds.
"""
