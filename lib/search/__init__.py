"""Search and optimisation methods."""
