"""The demo's bar chart."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure  # no pyplot: no window, also where there is a display

from lmcache_fast.serve.demo.experiment import Result


def draw(result: Result, path: Path) -> None:
    """Draw the decode throughput of both runs into the PNG file ``path``."""
    settings = result.settings
    runs = {"whole KV": result.baseline, "middle half dropped": result.dropped}
    heights = [run.reports["decode"].output_tput for run in runs.values()]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.bar(list(runs), heights, color=["#8c8c8c", "#2a7fba"], width=0.55)
    axes.bar_label(bars, [f"{height:,.0f} tokens/s" for height in heights], padding=3)
    axes.set_ylabel("decoded tokens a second")
    axes.set_ylim(0, max(heights) * 1.15)
    axes.set_title(
        f"Decoding {result.decode_gain:.2f}× as fast with half of the KV\n"
        f"{settings.requests} prompts of {settings.prompt_tokens} tokens, "
        f"KV budget {settings.budget} tokens",
        fontsize=11,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=150)
