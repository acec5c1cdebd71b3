"""The charts of the documentation, drawn from the tables on its pages, so that the two always agree.

    python benchmarks/charts.py            # draw docs/chart-*.svg, docs/growth.svg and docs/scale-*.svg
    python benchmarks/charts.py --check    # exit with 1 where one of them is not what its table says

A chart is light or dark as the reader's system is. It has a background of its own, so it can be read on any page.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import re
import sys

from scale import CORES, MODELS

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
COLOURS = ("#4f83b6", "#c8643c", "#5a9a5a", "#9a6fb0", "#a08a3c")  # of curves: each stands out on both backgrounds
FIGURE = re.compile(r"[\d.,]*\d")
STYLE = """<style>
text { fill: #24292f } .ground { fill: #ffffff } .grid { stroke: #d8dee4 }
.other { fill: #a8b2bd } .ours { fill: #2f6fb0 }
@media (prefers-color-scheme: dark) {
text { fill: #d7dde4 } .ground { fill: #16191d } .grid { stroke: #343b44 }
.other { fill: #65707c } .ours { fill: #5aa0e6 }
}
</style>"""


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """A chart with a bar for each row of a table.

    Attributes:
        name: of the file.
        page: page of the documentation with the table.
        heading: heading above the table.
        title: what the bars are.
        column: name of the column of the figures; of several numbers in a cell the first one counts.
    """

    name: str
    page: str
    heading: str
    title: str
    column: str


CHARTS = [
    Bars("chart-pairs", "benchmarks", "Augmented pairs", "Four copies of 701 pairs: seconds of the clock", "wall, s"),
    Bars("chart-rows", "benchmarks", "Tiny rows", "200,000 tiny rows: seconds of the clock", "wall, s"),
    Bars("chart-read", "benchmarks", "Reading", "Reading, shuffled: samples a second", "shuffled, samples/s"),
    Bars("chart-remote", "benchmarks", "Reading from a server", "From a server 50 ms away: samples a second", "50 ms"),
    Bars("chart-comparison", "comparison", "One task, seven programs", "Seconds of the processor", "processor, s"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a chart is out of date")
    options = parser.parse_args()
    drawn = {DOCS / f"{chart.name}.svg": bars(chart) for chart in CHARTS}
    drawn |= {
        DOCS / "growth.svg": growth(),
        DOCS / "scale-driver.svg": driver(),
        DOCS / "scale-machines.svg": machines(),
    }
    stale = [path for path, svg in drawn.items() if not path.exists() or path.read_text() != svg]
    if options.check and stale:
        sys.exit(f"out of date: {', '.join(path.name for path in stale)}; run python benchmarks/charts.py")
    for path in stale:
        path.write_text(drawn[path])


def table(page: str, heading: str) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the first table below a heading of a page, in Markdown."""
    text = (DOCS / f"{page}.md").read_text().split(f"\n## {heading}\n")[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines]
    return head, rows


def number(cell: str) -> float:
    return float(FIGURE.search(cell)[0].replace(",", ""))


def bars(chart: Bars) -> str:
    """Return a chart as SVG, with a horizontal bar for each row of the table, those of datamat in another colour."""
    head, rows = table(chart.page, chart.heading)
    at = head.index(chart.column)
    most = max(number(row[at]) for row in rows)
    left = 24 + round(6.4 * max(len(row[0].replace("*", "")) for row in rows))
    width, step, top = 760, 22, 34
    lines = opening(width, top + step * len(rows) + 8, chart.title)
    for place, row in enumerate(rows):
        y, length = top + step * place, number(row[at]) / most * (width - left - 70)
        lines.append(text(left - 8, y + 13, re.sub("[*`]", "", row[0]), 'text-anchor="end"'))
        kind = "ours" if re.match(r"\*\*|`?datamat|`to_(numpy|torch|tf)\b", row[0]) else "other"
        lines.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{length:.1f}" height="16" rx="2"/>')
        lines.append(text(left + length + 6, y + 13, FIGURE.search(row[at])[0], ""))
    return "\n".join([*lines, "</svg>", ""])


def growth() -> str:
    """Return the chart of seconds and memory over numbers of rows."""
    head, rows = table("benchmarks", "How a run grows")
    names = ("processor, s", "wall, s", "PSS, MB")
    found = {name: [number(row[head.index(name)]) for row in rows] for name in names}
    return curves("Rows of ten float32, one call each, two workers", "rows", [number(row[0]) for row in rows], found)


def driver() -> str:
    """Return the chart of what the driver spends over numbers of parts."""
    head, rows = table("scale", "The driver")
    names = {
        "a whole run, s": "a whole run, s",
        "a run that was killed before its last shard, until its first part is handed out, s": "rerun, first part, s",
        "a run with nothing to do, s": "nothing to do, s",
        "memory, MB": "memory, MB",
        "manifest, MB": "manifest, MB",
    }
    found = {names[row[0]]: [number(cell) for cell in row[1:]] for row in rows if row[0] in names}
    return curves(
        "What the driver spends: processor seconds and MB", "parts", [number(cell) for cell in head[1:]], found
    )


def machines() -> str:
    """Return the chart of records a second over cores, by the model of benchmarks/scale.py."""
    found = {name: [model.records_a_second(cores) for cores in CORES] for name, model in MODELS.items()}
    return curves("Records a second, by the measured model", "cores", list(map(float, CORES)), found)


def curves(title: str, unit: str, sizes: list[float], found: dict[str, list[float]]) -> str:
    """Return a chart as SVG, with a curve for each name over the sizes, both by logarithm."""
    width, height, left, right, top, bottom = 760, 310, 66, 176, 36, 40
    low = math.floor(math.log10(min(map(min, found.values()))))
    high = math.ceil(math.log10(max(map(max, found.values()))))
    first, last = math.log10(min(sizes)), math.log10(max(sizes))

    def x(size: float) -> float:
        return left + (math.log10(size) - first) / (last - first) * (width - left - right)

    def y(value: float) -> float:
        return height - bottom - (math.log10(value) - low) / max(high - low, 1) * (height - top - bottom)

    lines = opening(width, height, title)
    lines.append(text((left + width - right) / 2, height - 6, unit, 'text-anchor="middle"'))
    for power in range(low, high + 1):
        at = y(10.0**power)
        lines.append(f'<path class="grid" d="M{left} {at:.1f}H{width - right}"/>')
        shown = f"{10.0**power:g}" if power < 0 else f"{10**power:,}"
        lines.append(text(left - 6, at + 4, shown, 'text-anchor="end"'))
    for size in sizes:
        lines.append(text(x(size), height - bottom + 16, f"{size:,.0f}", 'text-anchor="middle"'))
    below = math.inf
    for (name, values), colour in sorted(zip(found.items(), COLOURS, strict=False), key=lambda one: one[0][1][-1]):
        points = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in zip(sizes, values, strict=True))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        below = min(y(values[-1]) + 4, below - 14)  # names of curves that end together stand above each other
        lines.append(text(x(sizes[-1]) + 8, below, name, f'style="fill:{colour}"'))
    return "\n".join([*lines, "</svg>", ""])


def opening(width: int, height: int, title: str) -> list[str]:
    size = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        STYLE,
        f'<rect class="ground" width="{width}" height="{height}" rx="6"/>',
        text(14, 20, title, 'font-weight="bold"'),
    ]


def text(x: float, y: float, content: str, attributes: str) -> str:
    escaped = content.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escaped}</text>'


if __name__ == "__main__":
    main()
