"""Recordings and module states: their rows, and their files of flat binary columns, mapped and read without parsing.
What must hold is checked in validate/.
"""
