"""Draw one round of PeFLL: who computes what, and what crosses the network.

python docs/images/round.py writes docs/images/round.svg; another file name, such as round.png, may follow.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

INK, FAINT = "#333333", "#8a8a8a"
SERVER, CLIENT = "#0072B2", "#D55E00"
LEFT, RIGHT, WIDTH = 0.2, 6.3, 3.5  # where the two columns begin, and how wide they are

# From top to bottom: (side, height of the box's middle, title, formula).
BOXES = [
    ("client", 5.35, "describe", r"$v_i$ = mean of $\varphi(x, y;\,\eta_v)$ over a batch"),
    ("server", 4.4, "generate", r"$\theta_i = h(v_i;\,\eta_h)$"),
    ("client", 3.45, "adapt", r"$k$ steps of SGD, $\Delta\theta_i$ = before $-$ after"),
    ("server", 2.5, "pull back through $h$", r"$\Delta\theta_i \rightarrow \Delta\eta_h,\ \Delta v_i$"),
    ("client", 1.55, r"pull back through $\varphi$", r"$\Delta v_i \rightarrow \Delta\eta_v$"),
    ("server", 0.6, "step", r"Adam on the means of $\Delta\eta_h$ and $\Delta\eta_v$"),
]
# What crosses: (towards the client, height, label).
MESSAGES = [
    (True, 5.5, r"$\eta_v$, to everyone"),
    (False, 4.75, r"$v_i$"),
    (True, 3.95, r"$\theta_i$, to each its own"),
    (False, 2.85, r"$\Delta\theta_i$"),
    (True, 2.05, r"$\Delta v_i$"),
    (False, 0.95, r"$\Delta\eta_v$"),
]


def picture() -> Figure:
    """Return the figure."""
    figure = Figure(figsize=(9.6, 5.4), layout="tight")
    axes = figure.add_subplot()
    axes.set(xlim=(0, 10), ylim=(0, 6.4))
    axes.axis("off")
    for x, colour, title in ((LEFT, SERVER, "Server"), (RIGHT, CLIENT, "Each client $i$ of the round")):
        axes.text(x + WIDTH / 2, 6.15, title, ha="center", va="center", color=colour, weight="bold", fontsize=12)
    axes.text(LEFT + WIDTH / 2, 5.5, r"holds $\eta_h$ and $\eta_v$", ha="center", va="center", color=FAINT)
    axes.text(RIGHT + WIDTH / 2, 0.6, r"keeps its samples", ha="center", va="center", color=FAINT)
    for side, y, title, formula in BOXES:
        x, colour = (LEFT, SERVER) if side == "server" else (RIGHT, CLIENT)
        shape = "round,pad=0,rounding_size=0.12"
        axes.add_patch(FancyBboxPatch((x, y - 0.36), WIDTH, 0.72, shape, facecolor="white", edgecolor=colour, lw=1.4))
        axes.text(x + WIDTH / 2, y + 0.16, title, ha="center", va="center", weight="bold")
        axes.text(x + WIDTH / 2, y - 0.16, formula, ha="center", va="center")
    for down, y, label in MESSAGES:
        ends = (LEFT + WIDTH + 0.1, RIGHT - 0.1) if down else (RIGHT - 0.1, LEFT + WIDTH + 0.1)
        colour = SERVER if down else CLIENT
        axes.annotate("", (ends[1], y), (ends[0], y), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.4})
        axes.text(5, y + 0.12, label, ha="center", va="bottom", color=colour)
    return figure


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    # A fixed salt and no date, so that the same drawing is the same file.
    with rc_context({"font.size": 10, "text.color": INK, "svg.hashsalt": "pefll", "mathtext.fontset": "cm"}):
        picture().savefig(target, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)
