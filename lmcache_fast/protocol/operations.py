"""Operation numbers of the LMCache multiprocess protocol.

Release 0.5.3 renumbered the table, adding three to every number used here.
"""

from __future__ import annotations

from enum import Enum


class Operation(Enum):
    """An operation, by the name that every release knows it under."""

    LOOKUP = "lookup"
    QUERY_PREFETCH_STATUS = "query_prefetch_status"
    WAIT_PREFETCH_STATUS = "wait_prefetch_status"
    FREE_LOOKUP_LOCKS = "free_lookup_locks"
    END_SESSION = "end_session"
    REGISTER = "register_kv_cache_engine_driven_context"
    UNREGISTER = "unregister_kv_cache_engine_driven_context"
    PREPARE_STORE = "prepare_store"
    COMMIT_STORE = "commit_store"
    PREPARE_RETRIEVE = "prepare_retrieve"
    COMMIT_RETRIEVE = "commit_retrieve"
    CLEAR = "clear"
    GET_CHUNK_SIZE = "get_chunk_size"
    PING = "ping"
    NOOP = "noop"


#: Numbers in 0.5.1 and 0.5.2.
FIRST_NUMBERS: dict[Operation, int] = {
    Operation.LOOKUP: 5,
    Operation.QUERY_PREFETCH_STATUS: 6,
    Operation.WAIT_PREFETCH_STATUS: 7,
    Operation.FREE_LOOKUP_LOCKS: 9,
    Operation.END_SESSION: 10,
    Operation.REGISTER: 11,
    Operation.UNREGISTER: 12,
    Operation.PREPARE_STORE: 13,
    Operation.COMMIT_STORE: 14,
    Operation.PREPARE_RETRIEVE: 15,
    Operation.COMMIT_RETRIEVE: 16,
    Operation.CLEAR: 17,
    Operation.GET_CHUNK_SIZE: 18,
    Operation.PING: 19,
    Operation.NOOP: 21,
}

#: Numbers in 0.5.3 and later.
NUMBERS: dict[Operation, int] = {
    operation: number + 3 for operation, number in FIRST_NUMBERS.items()
}
