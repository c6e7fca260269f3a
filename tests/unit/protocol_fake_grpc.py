"""The scripted server, over gRPC."""

from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import msgspec

from lmcache_fast.protocol import protobuf
from lmcache_fast.protocol.operations import Operation
from tests.unit.protocol_fake import TRANSFERS, FakeServer

_KEY = ("model_name", "world_size", "worker_id", "tokens", "start", "end", "request_id")
_REGISTER = (
    *("instance_id", "model_name", "world_size", "block_size", "num_layers"),
    *("hidden_dim_size", "dtype_str", "use_mla"),
)


class GrpcFakeServer(FakeServer):
    """Handlers as in FakeServer; one that raises is answered with an error, as gRPC does.

    ``paths`` lists the methods as they were called.
    """

    def __init__(self, version: str = "0.5.6", address: str = "", **mp: Any) -> None:
        self._address = address
        self.paths: list[str] = []
        super().__init__(version, transport="grpc", **mp)

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self._port}" if not self._address else f"grpc+{self._address}"

    def start(self) -> None:
        """Start serving, on the same port as before."""
        no_limit = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
        self._server = grpc.server(
            ThreadPoolExecutor(8), handlers=[_Handlers(self._serve)], options=no_limit
        )
        address = self._address or f"127.0.0.1:{self._port}"
        self._port = self._server.add_insecure_port(address)
        self._server.start()

    def stop(self) -> None:
        """End as a server that is killed does."""
        self._server.stop(None).wait()
        self.instances.clear()

    def close(self) -> None:
        self.stop()
        self._http.shutdown()
        self._http.server_close()

    def _serve(self, path: str, message: bytes) -> bytes:
        self.paths.append(path)
        method = path.rpartition("/")[2]
        operation = next(o for o in Operation if o.value.replace("_", "") == method.lower())
        payloads = _payloads(operation, protobuf.read(message))
        self.seen.append((operation, payloads))
        if operation in TRANSFERS and payloads[1] not in self.instances:
            raise ValueError("instance not registered")
        result = self.on[operation](*payloads)
        return _reply(operation, None if operation is Operation.UNREGISTER else result)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, serve: Callable[[str, bytes], bytes]) -> None:
        self._serve = serve

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            lambda message, context: self._serve(details.method, message)
        )


def _text(value: Any) -> Any:
    return str(value, "utf-8") if isinstance(value, memoryview) else value


def _key(message: Any) -> dict[str, Any]:
    fields = protobuf.read(bytes(message))
    key: dict[str, Any] = {name: fields.get(number) for number, name in enumerate(_KEY, 1)}
    tokens = bytes(key.pop("tokens"))
    named = {name: _text(value) for name, value in key.items()}
    return {**named, "tokens": tokens, "cache_salt": _text(fields[8])}


def _payloads(operation: Operation, fields: dict[int, Any]) -> list[Any]:
    """A message as the payloads that ZeroMQ would bring."""
    if operation is Operation.REGISTER:
        return [{name: _text(fields[number]) for number, name in enumerate(_REGISTER, 1)}]
    if operation is Operation.WAIT_PREFETCH_STATUS:
        return [_text(fields[1]), struct.unpack("<d", fields[2].to_bytes(8, "little"))[0]]
    if operation is Operation.PING:
        return [fields.get(1)]
    payloads = [_text(fields[1]) if 2 not in fields else _key(fields[1])]
    payloads += [fields[2]] if 2 in fields else []
    return [*payloads, bytes(fields[3])] if operation is Operation.COMMIT_STORE else payloads


def _reply(operation: Operation, result: Any) -> bytes:
    if result is None:
        return b""
    if operation is Operation.REGISTER:
        name, size = result["shm_name"], result["pool_size"]
        return protobuf.data(1, name) + protobuf.integer(2, size)
    if operation is Operation.PREPARE_STORE:
        return protobuf.data(1, msgspec.msgpack.encode(result["context"]))
    if operation is Operation.PREPARE_RETRIEVE:
        context = msgspec.msgpack.encode(result["context"])
        inline = protobuf.data(2, result["data"]) + protobuf.data(3, context)
        return protobuf.integer(1, result["success"]) + inline
    return protobuf.integer(1, result)
