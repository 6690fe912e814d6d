"""What an engine holds: a connection to the server that heals itself and never makes the engine wait for a dead one."""

from lmcache.client.client import Client

__all__ = ["Client"]
