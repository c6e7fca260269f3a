"""An LMCache server for tests and demonstrations, in one process and without a GPU."""

from lmcache_fast.serve.server.config import ServerConfig
from lmcache_fast.serve.server.embedded import EmbeddedServer

__all__ = ["EmbeddedServer", "ServerConfig"]
