"""What travels between engine and server."""
