"""The HTTP listener: health, status, metrics and what an operator may change."""
