"""Which configuration a product or convolution gets: by measurements of its architecture, else by a model of cost."""
