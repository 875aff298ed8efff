"""Draws the curves of `benchmarks.compression_accuracy` as an SVG file.

python -m scripts.loss_curves RESULTS.jsonl docs/compression_curves.svg
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 60, 20, 190, 40
COLOURS = ("#000000", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#d62728", "#8c564b", "#17becf")


def draw(lines: list[dict[str, Any]]) -> str:
    """Training loss over epochs, on a logarithmic axis; dashed without error feedback."""
    names = list(dict.fromkeys(line["codec"] for line in lines))
    losses = [loss for line in lines for loss in line["losses"]]
    low, high = math.floor(math.log10(min(losses))), math.ceil(math.log10(max(losses)))
    epochs = max(len(line["losses"]) for line in lines)

    def x(epoch: float) -> float:
        return LEFT + (epoch - 1) / max(epochs - 1, 1) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - math.log10(loss)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        '<g font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{x((1 + epochs) / 2):.0f}" y="{HEIGHT - 6}" text-anchor="middle">epoch</text>',
        f'<text x="6" y="{TOP + 4}">loss</text>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#cccccc"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for epoch in (1, *range(5, epochs + 1, 5)):
        parts.append(f'<text x="{x(epoch):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{epoch}</text>')
    for index, line in enumerate(lines):
        points = " ".join(f"{x(epoch):.1f},{y(loss):.1f}" for epoch, loss in enumerate(line["losses"], 1))
        is_plain = line["codec"] == "none"
        dashes = "" if line["error feedback"] or is_plain else ' stroke-dasharray="4 4"'
        colour = COLOURS[names.index(line["codec"]) % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        label = "plain gradients" if is_plain else line["codec"] + ("" if line["error feedback"] else ", no feedback")
        at = TOP + 10 + 20 * index
        parts.append(f'<path d="M{WIDTH - RIGHT + 14} {at}h26" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 46}" y="{at + 4}">{label}</text>')
    return "\n".join([*parts, "</g></svg>"]) + "\n"


def main() -> None:
    """Read, draw, write."""
    source, target = map(Path, sys.argv[1:3])
    target.write_text(draw([json.loads(line) for line in source.read_text().splitlines()]))


if __name__ == "__main__":
    main()
