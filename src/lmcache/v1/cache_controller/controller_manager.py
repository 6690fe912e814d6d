"""The controller that routers import by this path: it asks a coordinator."""

from lmcache.fleet.controller_client import LMCacheControllerManager

__all__ = ["LMCacheControllerManager"]
