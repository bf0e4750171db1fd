"""Which configuration a product or convolution gets: measurements per architecture, else a model of cost.
The measurements lie beside the code.
"""
