"""Draw the README's animation and bar chart, docs/images/moving_experts.svg and .png, from moving_experts.json.

    python benchmarks/speed/moving_experts_image.py

The animation shows the first and the last turn of one guarded run on two ranks: tokens per expert, the rank that has
each expert, and the ranks' shares of the tokens. Step times are medians over all rounds, of experts that stay and of
the guarded runs, migrations included. The bars are speed-ups by processor time of the busiest rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "results" / "moving_experts.json"
IMAGE = ROOT / "docs" / "images" / "moving_experts.svg"
BARS = IMAGE.with_suffix(".png")
CONTENDERS = {
    "blocks, never moved": "experts stay",
    "swap": "swap, default guard",
    "swap, a spare slot": "swap, a spare slot per rank",
    "eplb, no guard": "DeepSeek's EPLB at each plan",
}

WIDTH, HEIGHT = 760, 330
LEFT, PITCH, BAR = 96, 40, 30
"""Left end of the experts, distance between two of them and width of one, in pixels."""
FLOORS, TALLEST = (142, 278), 82
"""Baselines of the ranks' bars, and height of the busiest expert."""
METER_LEFT, METER_WIDTH = 470, 250

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 11px; fill: #59636e; }
.title { font-size: 16px; font-weight: 600; }
.time { font-size: 22px; font-weight: 600; }
.line { stroke: #d1d9e0; }
.track { fill: #eaeef2; }
.rank0 { fill: #0969da; }
.rank1 { fill: #bc4c00; }
.expert, .meter, .before, .after { animation: 9s ease-in-out infinite; }
.before { animation-name: before; }
.after { animation-name: after; }
@keyframes before { 0%, 38% { opacity: 1; } 46%, 94% { opacity: 0; } 100% { opacity: 1; } }
@keyframes after { 0%, 38% { opacity: 0; } 46%, 94% { opacity: 1; } 100% { opacity: 0; } }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } .small { fill: #9198a1; } .line { stroke: #3d444d; } .track { fill: #262c36; }
  .rank0 { fill: #4493f8; } .rank1 { fill: #f0883e; }
}
@media (prefers-reduced-motion: reduce) { .expert, .meter, .before, .after { animation-duration: 0s; } }
"""


def columns(before: list[int], after: list[int]) -> tuple[list[int], list[int]]:
    """Return the column of each expert in its rank's row before and after; experts that stay keep their column."""
    taken = [sum(rank == other for other in before[:expert]) for expert, rank in enumerate(before)]
    stays = [old == new for old, new in zip(before, after, strict=True)]
    found = [column if stay else -1 for column, stay in zip(taken, stays, strict=True)]
    for expert, rank in enumerate(after):
        if found[expert] < 0:
            used = {found[other] for other in range(len(after)) if after[other] == rank}
            found[expert] = min(set(range(len(after))) - used)
    return taken, found


def keyframes(name: str, before: str, after: str) -> str:
    return f"@keyframes {name} {{ 0%, 34% {{ {before} }} 50%, 92% {{ {after} }} 100% {{ {before} }} }}"


def draw(first: dict[str, Any], last: dict[str, Any], milliseconds: tuple[float, float]) -> str:
    """Return the SVG of two turns and the step times without and with moves."""
    old_columns, new_columns = columns(first["rank"], last["rank"])
    styles, shapes = [STYLE], []
    busiest = max(max(first["load"]), max(last["load"]))
    for expert, (old, new) in enumerate(zip(first["rank"], last["rank"], strict=True)):
        height = TALLEST * first["load"][expert] / busiest
        x, y = LEFT + PITCH * old_columns[expert], FLOORS[old]
        dx, dy = PITCH * (new_columns[expert] - old_columns[expert]), FLOORS[new] - FLOORS[old]
        if old != new:
            styles.append(keyframes(f"expert{expert}", "transform: none;", f"transform: translate({dx}px, {dy}px);"))
        shapes.append(
            f'<g class="expert" style="animation-name: expert{expert}">'
            f'<rect class="rank{old}" x="{x}" y="{y - height:.1f}" width="{BAR}" height="{height:.1f}" rx="3"/>'
            f'<text class="small" x="{x + BAR / 2}" y="{y + 15}" text-anchor="middle">{expert}</text></g>'
        )
    shares = [
        [sum(load for load, rank in zip(turn["load"], turn["rank"], strict=True) if rank == row) / sum(turn["load"])
         for row in (0, 1)]
        for turn in (first, last)
    ]  # fmt: skip
    for row, floor in enumerate(FLOORS):
        old, new = (METER_WIDTH * turn[row] for turn in shares)
        styles.append(keyframes(f"meter{row}", "transform: none;", f"transform: scaleX({new / old:.4f});"))
        shapes += [
            f'<text x="{LEFT - 16}" y="{floor - 8}" text-anchor="end">Rank {row}</text>',
            f'<line class="line" x1="{LEFT - 8}" x2="{LEFT + 8 * PITCH}" y1="{floor + 0.5}" y2="{floor + 0.5}"/>',
            f'<rect class="track" x="{METER_LEFT}" y="{floor - 22}" width="{METER_WIDTH}" height="18" rx="3"/>',
            f'<rect class="meter rank{row}" style="animation-name: meter{row}; transform-origin: {METER_LEFT}px 0" '
            f'x="{METER_LEFT}" y="{floor - 22}" width="{old:.1f}" height="18" rx="3"/>',
            *(
                f'<text class="{state}" x="{METER_LEFT}" y="{floor - 30}">{100 * turn[row]:.0f} % of the tokens</text>'
                for state, turn in zip(("before", "after"), shares, strict=True)
            ),
        ]
    titles = ("Experts stay where they started", "Experts move to balance the load")
    for state, title, step in zip(("before", "after"), titles, milliseconds, strict=True):
        shapes += [
            f'<text class="title {state}" x="{LEFT - 76}" y="32">{title}</text>',
            f'<text class="time {state}" x="{METER_LEFT}" y="34">{step:.0f} ms per step</text>',
        ]
    shapes.append(
        f'<text class="small" x="{LEFT - 76}" y="{HEIGHT - 10}">Bars: tokens per expert. Colors: the rank where an '
        "expert started. Experts move with their optimizer state.</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img"><title>Experts move between two ranks until both ranks have equal load</title>\n'
        f"<style>{chr(10).join(styles)}</style>\n" + "\n".join(shapes) + "\n</svg>\n"
    )


def draw_bars(rows: list[dict[str, Any]]) -> None:
    """Draw the speed-ups of `CONTENDERS` on 2 and 4 ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 2.6), layout="constrained", dpi=150)
    axes = figure.subplots()
    ups = {(row["processes"], row["contender"]): row["x, busiest in each step"] for row in rows}
    for place, (contender, label) in enumerate(CONTENDERS.items()):
        heights = [ups[ranks, contender] for ranks in (2, 4)]
        color = "#8c959f" if place == 0 else f"C{place - 1}"
        drawn = axes.bar([group + 0.2 * place for group in range(2)], heights, 0.18, label=label, color=color)
        axes.bar_label(drawn, [f"{height:.2f}" for height in heights], fontsize=8)
    axes.set(ylim=(0, 1.9), ylabel="speed-up")
    axes.set_xticks([0.3, 1.3], ["2 ranks", "4 ranks"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False, fontsize=8)
    figure.savefig(BARS)


def main() -> int:
    record = json.loads(RECORD.read_text())
    rows = [row for row in record["rows"] if row["loads"] == "steep, larger"]
    times = {row["contender"]: row["ms a step"] for row in rows if row["processes"] == 2}
    turns = record["example"]
    IMAGE.write_text(draw(turns[0], turns[-1], (times["blocks, never moved"], times["swap"])))
    draw_bars(rows)
    print(IMAGE.relative_to(ROOT), BARS.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
