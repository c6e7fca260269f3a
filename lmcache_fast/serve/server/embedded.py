"""EmbeddedServer: a whole server in this process's threads."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lmcache_fast.closing import Closing
from lmcache_fast.serve.server.config import ServerConfig
from lmcache_fast.serve.server.http_service import HttpService, status
from lmcache_fast.serve.server.pool import Pool
from lmcache_fast.serve.server.transfers import CacheService
from lmcache_fast.serve.server.zmq_service import MessageLoop


class EmbeddedServer(Closing):
    """Serves from construction to :meth:`close`; also a context manager.

    Args:
        config: the settings; otherwise give :class:`ServerConfig`'s fields by name.

    Raises:
        InvalidInputError: a setting is out of range.
        ConnectError: an address cannot be bound.
        SharedMemoryError: the segment cannot be created.
    """

    def __init__(self, config: ServerConfig | None = None, **settings: Any) -> None:
        self.config = config if config is not None else ServerConfig(**settings)
        with ExitStack() as started:
            name = self.config.shm_name if self.config.shares_memory else ""
            pool = Pool(self.config.pool_bytes, name, self.config.populate)
            started.callback(pool.close)
            self._service = CacheService(self.config, pool)
            loop = MessageLoop(self._service, self.config.host, self.config.port)
            started.callback(loop.close)
            http = HttpService(self._service, loop.url)
            started.callback(http.close)
            self._running = started.pop_all()
        #: Address of the message port.
        self.url = loop.url
        #: Address of the HTTP side.
        self.http_url = http.url
        #: Name of the segment in ``/dev/shm``; empty without one.
        self.shm_name = pool.name

    def status(self) -> dict[str, Any]:
        """Return what ``/status`` answers."""
        return status(self._service)

    def close(self) -> None:
        """Stop serving and unlink the segment. Safe to call again."""
        self._running.close()
