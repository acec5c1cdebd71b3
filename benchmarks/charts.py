"""Curves over sizes, both by logarithm, drawn as SVG: how figures of a benchmark grow."""

from __future__ import annotations

import math

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 60, 150, 26, 40
COLOURS = ("#4878a8", "#c8643c", "#508c50", "#8c64a0", "#a08c3c")


def growth(title: str, sizes: list[float], curves: dict[str, list[float]], across: str) -> str:
    """Return a chart as SVG, with a line for each curve and its name at the end.

    Args:
        title: what the values are, with their unit.
        sizes: the values of the horizontal axis.
        curves: values at the sizes, by name; all above 0.
        across: name of the horizontal axis.
    """
    low = math.floor(math.log10(min(min(values) for values in curves.values())))
    high = math.ceil(math.log10(max(max(values) for values in curves.values())))
    first, last = math.log10(min(sizes)), math.log10(max(sizes))

    def x(size: float) -> float:
        return LEFT + (math.log10(size) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(value) - low) / max(high - low, 1) * (HEIGHT - TOP - BOTTOM)

    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    lines = [
        f'{opening} font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 16, title, 'font-weight="bold"'),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, across, 'text-anchor="middle"'),
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        lines.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        lines.append(text(LEFT - 6, at + 4, f"{10.0**power:g}", 'text-anchor="end"'))
    for size in sizes:
        lines.append(text(x(size), HEIGHT - BOTTOM + 16, f"{size:,.0f}", 'text-anchor="middle"'))
    for (name, values), colour in zip(curves.items(), COLOURS, strict=False):
        points = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in zip(sizes, values, strict=True))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(text(x(sizes[-1]) + 8, y(values[-1]) + 4, name, f'fill="{colour}"'))
    return "\n".join([*lines, "</svg>", ""])


def text(x: float, y: float, content: str, attributes: str) -> str:
    escaped = content.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escaped}</text>'
