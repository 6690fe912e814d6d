"""Scripts of the operator that run beside the server: found, started, logged, started again, and ended with it."""
