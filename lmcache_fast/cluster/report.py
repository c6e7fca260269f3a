"""What a phase over a cluster measured: the batch's metrics, and a table of the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lmcache_fast.metrics import Metrics, Number


@dataclass
class NodeTally:
    """What one phase did on one node.

    Attributes:
        streams: streams that the node finished, well or not.
        failed: those of them that failed.
        moved_in: streams that came from a node that died.
        input_tokens: tokens sent to its engine.
        output_tokens: tokens that its engine generated.
        bytes_sent: payload from the driver to it: token ids, salts, ids, parameters, the edit.
        bytes_received: payload back: token ids, text, metrics. What Ray adds is not counted.
    """

    streams: int = 0
    failed: int = 0
    moved_in: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class ClusterMetrics(Metrics):
    """:class:`lmcache_fast.metrics.Metrics` with a table by node.

    Attributes:
        nodes: each node's :class:`NodeTally`, by name.
    """

    def __init__(
        self,
        title: str,
        config: Mapping[str, Number],
        results: Mapping[str, Number],
        fmt: str,
        width: int,
        nodes: Mapping[str, NodeTally],
    ) -> None:
        super().__init__(title, config, results, fmt, width)
        self.nodes = dict(nodes)

    def to_dict(self) -> dict[str, Any]:
        """Return what Metrics does, with ``nodes`` beside ``config`` and ``results``."""
        report = super().to_dict()
        report["metrics"]["nodes"] = {name: asdict(tally) for name, tally in self.nodes.items()}
        return report

    def _table(self) -> str:
        columns = list(asdict(NodeTally()))
        rows = [["node", *columns]]
        rows += [[name, *map(str, asdict(tally).values())] for name, tally in self.nodes.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [super()._table()]
        for row in rows:
            cells = [cell.rjust(size) for cell, size in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
        lines.append("=" * self.width)
        return "\n".join(lines)
