"""Inside a recorder process: load the program, capture every int_key, read the graphs with the driver.
Plain rows go back to the parent.
"""
