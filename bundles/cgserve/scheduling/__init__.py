"""Which requests the next call of the model serves, and which pages of the cache each has."""
