"""Inside a recorder process: load the program, capture every int_key, read the graphs with the driver, send plain rows back."""
