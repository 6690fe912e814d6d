"""One file a type of adapter."""
