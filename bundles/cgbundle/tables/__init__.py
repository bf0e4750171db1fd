"""Graph tables: the rows of a recording as flat binary columns, mapped and read without parsing.
With the check of every row.
"""
