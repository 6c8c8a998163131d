"""Lists the functions that a reader meets between `pefll train` and the first round.

A reader opens the functions of `cli` and `training`, and the functions that lead to the first round. Each function of
this package that one of these calls is a hop, and counts once. A reader does not open functions of other packages: the
name of `load_samples`, for example, says enough. Properties are not hops. This command makes the list in
docs/structure.md:

    python -m benchmarks.hops
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import pefll.cli as cli
from pefll.core.errors import PefllError

ROOT = Path(cli.__file__).parents[1]
OPENED = ("cli/", "training/")  # packages whose functions a reader opens
FIRST = "cli/training.py:train"


def place_of(frame: FrameType | None) -> str:
    """Return a function's file and name; "" for properties, inner functions, and functions outside this package."""
    if frame is None or not frame.f_code.co_filename.startswith(f"{ROOT}/"):
        return ""
    name = frame.f_code.co_qualname
    kind = type(frame.f_locals.get("self"))
    if "<" in name or isinstance(getattr(kind, frame.f_code.co_name, None), property):
        return ""
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{name}"


def waiting(frame: FrameType) -> list[str]:
    """Return the callers of a frame that are in this package, the nearest first."""
    found = []
    back = frame.f_back
    while back is not None:
        if place := place_of(back):
            found.append(place)
        back = back.f_back
    return found


def hops(arguments: list[str]) -> list[str]:
    """Run the command line, and return the hops until the first round in the order of their first calls."""
    callers: dict[str, set[str]] = {}
    leading: set[str] = set()  # functions that lead to the first round

    def note(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        place = place_of(frame)
        if event != "call" or not place or leading:
            return
        before = waiting(frame)
        callers.setdefault(place, set()).update(before[:1])
        if place.startswith("methods/") and place.endswith(".round"):
            leading.update([place, *before[: before.index(FIRST) + 1]])

    given, sys.argv = sys.argv, ["pefll", *arguments]
    sys.setprofile(note)
    try:
        cli.main()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
        sys.argv = given
    if not leading:
        raise PefllError(f"pefll {' '.join(arguments)} came to no round")
    opened = set(leading)
    while more := {place for place in callers if place.startswith(OPENED) and callers[place] & opened} - opened:
        opened |= more
    return [place for place in callers if place in leading or callers[place] & opened]


def main() -> None:
    """Print the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="pefll")
    parser.add_argument("--engine", default="serial", choices=["serial", "vector"])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--data", "digits", "--rounds", "1", "--device", "cpu", "--processes", "1", "--out", f"{folder}/run"]
        found = hops(["train", "--method", chosen.method, "--engine", chosen.engine, *options])
    file = ""
    for number, place in enumerate(found, 1):
        file, before = place.partition(":")[0], file
        print(f"{number:3d} {file if file != before else '':26} {place.partition(':')[2]}")
    print(f"{len(found)} hops through {len({place.partition(':')[0] for place in found})} files")


if __name__ == "__main__":
    main()
