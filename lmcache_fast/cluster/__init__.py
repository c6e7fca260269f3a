"""One batch over many nodes, each with its engine and, beside it, its LMCache server. On Ray.

::

    nodes = [Node("tcp://localhost:6555", "http://localhost:8080", "http://localhost:8000", MODEL,
                  resource=f"lmcache-{i}") for i in range(100)]
    with ClusterBatchedStream(nodes) as batch:
        for prompt in prompts:
            batch.add(prompt)
        batch.prefill({"temperature": 0.0}).emit()
        batch.modify(edits.drop_middle_chunks(0.5)).emit()
        batch.decode({"temperature": 0.0, "max_tokens": 256}).emit()

KV never crosses the network: each edit runs on the node whose server holds the KV. Needs the extra
``ray``; scheduling, transport and membership are Ray's.
"""

from lmcache_fast.cluster.batch import ClusterBatchedStream
from lmcache_fast.cluster.data import CompletePrompts
from lmcache_fast.cluster.fleet import Fleet
from lmcache_fast.cluster.node import Node, nodes_from_coordinator
from lmcache_fast.cluster.report import ClusterMetrics
from lmcache_fast.cluster.stream import ClusterStream

__all__ = [
    "ClusterBatchedStream",
    "ClusterMetrics",
    "ClusterStream",
    "CompletePrompts",
    "Fleet",
    "Node",
    "nodes_from_coordinator",
]
