"""Many servers as one cache: the coordinator, and what a server tells it."""
