"""Draw the results' pictures, and put their table into docs/performance.md.

``python -m bench.draw``
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
_BEGIN, _END = "<!-- results -->\n", "<!-- end of results -->\n"
_OURS, _OTHER = "#1f77b4", "#b8b8b8"
_MEASURES = {
    "lease": "view all chunks in place\n(upstream: retrieve)",
    "modify_middle": "drop the middle half,\nrotate keys",
    "modify_second": "keep every second token,\nrotate keys",
    "retrieve": "retrieve",
    "store": "store",
    "first_store": "first store\nof a new client",
    "retrieve_one_chunk": "retrieve one chunk",
    "store_one_chunk": "store one chunk",
    "pickle_store": "store without\nshared memory",
    "pickle_store_and_retrieve": "store and retrieve\nwithout shared memory",
}


def draw_ratios(report: dict[str, Any], path: Path) -> None:
    """Bars: how many times faster than upstream's SDK, with both times beside them."""
    results = report["results"]
    names = [name for name in _MEASURES if name in results][::-1]
    ratios = [results[name]["ratio"] for name in names]
    figure, axes = plt.subplots(figsize=(8.5, 0.55 * len(names) + 1.2))
    axes.barh([_MEASURES[name] for name in names], ratios, color=_OURS)
    axes.axvline(1, color="black", linewidth=0.8)
    for place, name in enumerate(names):
        ours, theirs = results[name]["ours_ms"], results[name]["upstream_ms"]
        text = f"  {ratios[place]:.1f}×   ({theirs:,.0f} → {ours:,.1f} ms)"
        axes.text(ratios[place], place, text, va="center", fontsize=9)
    axes.set_xlim(0, max(ratios) * 1.35)
    axes.set_xlabel(f"times as fast as upstream's SDK on the same {report['server']} server")
    axes.set_title("One request of Qwen3-8B: 4,096 tokens, 604 MB of KV", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def draw_throughput(groups: dict[str, Any], path: Path) -> None:
    """Lines: GB/s by request size, one line a transport, one panel an operation."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for each in groups["benchmarks"]:
        info = each["extra_info"]
        if "transport" in info:
            rate = info["bytes"] / each["stats"]["median"] / 1e9
            panels[info["operation"]][info["transport"]].append((info["bytes"] / 1e6, rate))
    figure, all_axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), squeeze=False)
    for axes, (operation, lines) in zip(all_axes[0], panels.items(), strict=True):
        for transport, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=transport)
        axes.set(title=operation, xlabel="request, MB", xscale="log", yscale="log")
        axes.grid(alpha=0.3)
    all_axes[0][0].set_ylabel("GB/s")
    all_axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def draw_roofline(groups: dict[str, Any], path: Path) -> None:
    """Bars: bytes read and written a second, as a share of the copy roofline of the same run."""
    kernels = [each for each in groups["benchmarks"] if "moved_bytes" in each["extra_info"]]
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    for each in kernels:
        info = each["extra_info"]
        rates[info["geometry"]][info["kernel"]] = info["moved_bytes"] / each["stats"]["median"]
    figure, axes = plt.subplots(figsize=(8.5, 4))
    names = list(dict.fromkeys(each["extra_info"]["kernel"] for each in kernels))
    for place, name in enumerate(names):
        shares = [by_kernel.get(name, 0) / by_kernel["roofline"] for by_kernel in rates.values()]
        positions = [index + place / (len(names) + 1) for index in range(len(rates))]
        color = _OTHER if name in ("torch", "memcpy") else None
        axes.bar(positions, shares, width=1 / (len(names) + 2), label=name, color=color)
    axes.set_xticks([index + 0.35 for index in range(len(rates))], list(rates))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("share of the copy roofline")
    axes.legend(fontsize=8, ncols=7, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def table(report: dict[str, Any]) -> str:
    """The results beside upstream's SDK as a Markdown table."""
    results, machine = report["results"], report["machine"]
    lines = [
        f"{machine['cores']} cores, {machine['processor']}; {report['server']}; medians of "
        f"{report['pairs']} alternating pairs, with the lowest and highest of their ratios.",
        "",
        "| what | ours, ms | upstream's, ms | times as fast | lowest – highest |",
        "|---|---|---|---|---|",
    ]
    for name, title in _MEASURES.items():
        if name in results:
            each = results[name]
            what = title.replace("\n", " ")
            spread = f"{min(each['ratios']):.1f} – {max(each['ratios']):.1f}"
            lines.append(
                f"| {what} | {each['ours_ms']:,.1f} | {each['upstream_ms']:,.1f} | "
                f"**{each['ratio']:.1f}** | {spread} |"
            )
    lines += ["", "| what | |", "|---|---|"]
    copy_ms = results["kernel_middle"]["copy_seconds"] * 1e3
    lines.append(f"| a plain copy of the request: the copy roofline | {copy_ms:.1f} ms |")
    for name in ("retrieve", "store"):
        waits = results[f"{name}_one_chunk_server_ms"]
        lines.append(f"| {name} one chunk: the server's answers over a bare socket | {waits} ms |")
    for which in ("middle", "second"):
        share = results[f"kernel_{which}"]["share_of_roofline"]
        lines.append(f"| edit kernel ({which}): share of the copy roofline | {share:.2f} |")
    batch = results["batch_of_8"]
    lines += [
        f"| memory that one edit adds | {results['modify_added_bytes'] / 1e6:.2f} MB |",
        f"| a batch of 8 streams, edited: time of eight single edits × | "
        f"{batch['ratio_to_eight_singles']:.2f} |",
        f"| memory that this batch adds | {batch['added_bytes'] / 1e6:.2f} MB |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Draw every picture whose results are there."""
    upstream, groups = RESULTS / "upstream.json", RESULTS / "groups.json"
    if upstream.exists():
        results = json.loads(upstream.read_text())
        draw_ratios(results, RESULTS / "upstream.png")
        head, _, rest = PAGE.read_text().partition(_BEGIN)
        PAGE.write_text(head + _BEGIN + table(results) + _END + rest.partition(_END)[2])
    if groups.exists():
        report = json.loads(groups.read_text())
        draw_throughput(report, RESULTS / "throughput.png")
        draw_roofline(report, RESULTS / "roofline.png")


if __name__ == "__main__":
    main()
