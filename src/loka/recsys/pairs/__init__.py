"""Arms trained in pairs from the same weights on the same rows."""
