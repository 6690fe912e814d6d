"""Eviction policies: pure orders over keys, without threads, clocks or I/O."""
