"""Recordings and module states: their rows, in files of flat binary columns that are mapped and read without parsing."""
