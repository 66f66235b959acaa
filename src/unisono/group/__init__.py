"""Groups of ranks on one host: how they are made, found by name, and called."""
