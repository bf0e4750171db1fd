"""Program in, program out, and what is proved about programs.
Random numbers, padding, outputs that share memory, custom operators of host regions.
"""
