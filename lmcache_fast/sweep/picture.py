"""The sweep's picture: what each policy gains and costs, by ratio."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure  # no pyplot: no window, also where there is a display

from lmcache_fast.sweep.run import Result

_PANELS = (
    ("gain", "decode throughput, × the unedited cache's"),
    ("kl", "mean KL of the next token, nats"),
    ("agreement", "greedy agreement"),
)


def draw(result: Result, path: Path) -> None:
    """Draw the rows into the picture file ``path``, in the format that its ending names."""
    unedited, *rows = result.rows
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, len(_PANELS))
    for axes, (name, label) in zip(panels, _PANELS, strict=True):
        for number, policy in enumerate(dict.fromkeys(row.policy for row in rows)):
            points = sorted((row.ratio, getattr(row, name)) for row in rows if row.policy == policy)
            style = {"color": f"C{number}", "marker": "os^vDPX*"[number % 8], "markersize": 5}
            axes.plot(*zip(*points, strict=True), label=policy, alpha=0.8, **style)
        axes.axhline(getattr(unedited, name), color="#8c8c8c", linestyle=":", label="unedited")
        axes.set_xlabel("fraction of the tokens removed")
        axes.set_title(label, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=9)
    figure.savefig(path, dpi=150)
