"""Every error this package raises on purpose.

::

    LMCacheFastError
     ├── InvalidInputError (ValueError)     an argument is wrong; nothing was touched
     │    └── EditError                     an edit function returned the wrong thing
     ├── ConnectError (ConnectionError)     no usable connection could be made
     │    ├── UnsupportedServerError        the server runs a mode or release we cannot speak
     │    └── UnknownModelError             no engine registered that model name
     ├── ServerGoneError (ConnectionError)  the server went away during a call
     ├── RequestDroppedError                the server threw a request away without a reply
     ├── ServerTimeoutError (TimeoutError)  no answer in time; says what was waited for
     │    └── ModifyTimeoutError            the prefix was not wholly cached in time
     ├── ProtocolError                      a reply does not say what the protocol asks for
     │    └── PayloadError                  inline or pickled data is not what was asked for
     ├── SharedMemoryError                  the server's pool cannot be mapped
     ├── LeaseExpiredError                  the server's read lock may have run out
     ├── StoreIncompleteError               part of a prefix could not be stored
     ├── ClosedError                        the object was closed before
     ├── EngineError                        the engine failed while generating
     ├── NodeLostError                      the node of a cluster that had a stream died
     └── BatchError                         some streams of a batch failed; names each

Every one of them is also a KVCacheSDKError, LMCacheSDKError, LMCacheStreamError,
LMCacheRequestStreamError and LMCacheBatchedStreamError, hence a RuntimeError: the names that
programs written for upstream's SDK catch. Upstream's own classes are not needed, and not these.
"""

from __future__ import annotations

from collections.abc import Mapping

_MAX_TEXT = 2000


class LMCacheSDKError(RuntimeError):
    """What programs for the second generation catch around contexts."""


class KVCacheSDKError(RuntimeError):
    """What programs for the first generation catch around contexts."""


class LMCacheStreamError(RuntimeError):
    """What programs for the first generation catch around streams."""


class LMCacheRequestStreamError(RuntimeError):
    """What programs for the second generation catch around streams."""


class LMCacheBatchedStreamError(RuntimeError):
    """What programs for both generations catch around batches."""


# One base for all: upstream lets the error of a context through a stream, and that of a stream
# through a batch, so a program may catch it by any of the names.
class LMCacheFastError(
    KVCacheSDKError,
    LMCacheSDKError,
    LMCacheStreamError,
    LMCacheRequestStreamError,
    LMCacheBatchedStreamError,
):
    """Base of all errors below.

    Its text is cut where a hostile value would make it too long for a log.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= _MAX_TEXT:
            return text
        return f"{text[:_MAX_TEXT]}... ({len(text) - _MAX_TEXT} more characters)"


class InvalidInputError(LMCacheFastError, ValueError):
    """An argument is wrong; nothing was touched."""


class EditError(InvalidInputError):
    """An edit function returned something that cannot be stored."""


class ConnectError(LMCacheFastError, ConnectionError):
    """No usable connection could be made."""


class UnsupportedServerError(ConnectError):
    """The server runs a mode, transport or release that this package cannot speak."""


class UnknownModelError(ConnectError):
    """No engine has registered the model name with this server."""


class ServerGoneError(LMCacheFastError, ConnectionError):
    """The server went away while a call was under way."""


class RequestDroppedError(LMCacheFastError):
    """The server threw a request away without replying to it."""


class ServerTimeoutError(LMCacheFastError, TimeoutError):
    """No answer came in time."""


class ModifyTimeoutError(ServerTimeoutError):
    """A stream's chunk-aligned prefix was not wholly cached in time."""


class ProtocolError(LMCacheFastError):
    """A reply does not have the form that the protocol asks for."""


class PayloadError(ProtocolError):
    """Inline or pickled chunk data is not what was asked for."""


class SharedMemoryError(LMCacheFastError):
    """The server's pool cannot be mapped."""


class LeaseExpiredError(LMCacheFastError):
    """The server's read lock may have run out, so the bytes can no longer be trusted."""


class StoreIncompleteError(LMCacheFastError):
    """Part of a prefix could not be stored.

    Attributes:
        stored_tokens: how many tokens of the prefix a lookup finds now.
        total_tokens: how many there should be.
    """

    def __init__(self, message: str, stored_tokens: int, total_tokens: int) -> None:
        super().__init__(message)
        self.stored_tokens = stored_tokens
        self.total_tokens = total_tokens


class ClosedError(LMCacheFastError):
    """The object was closed before."""


class EngineError(LMCacheFastError):
    """The engine failed, or broke off, while generating."""


class NodeLostError(LMCacheFastError):
    """The node of a cluster that had a stream died, and no other could take it over."""


class BatchError(LMCacheFastError):
    """Some streams of a batch failed; the others finished.

    Attributes:
        failures: the error of each failed stream, by stream id.
        metrics: what the batch measured over the streams that finished.
    """

    def __init__(
        self, message: str, failures: Mapping[str, BaseException], metrics: object
    ) -> None:
        super().__init__(message)
        self.failures = dict(failures)
        self.metrics = metrics
