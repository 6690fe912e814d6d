"""Traces of lookups, replayed against the eviction policies of the server without any payload."""
