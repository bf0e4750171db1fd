"""diff: what differs between two bundles, from their files alone: no GPU, no torch.

Where and when a bundle was built does not count, nor do bytes of parameters that no kernel reads.  So two builds of one model with
the same versions and options do not differ.  Everything else counts, also what a later version of the format adds.
"""
