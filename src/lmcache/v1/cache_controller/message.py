"""The messages of the controller that routers import by this path."""

from lmcache.fleet.controller_client import LookupMsg, LookupRetMsg, QueryInstMsg, QueryInstRetMsg

__all__ = ["LookupMsg", "LookupRetMsg", "QueryInstMsg", "QueryInstRetMsg"]
