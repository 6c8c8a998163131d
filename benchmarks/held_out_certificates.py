"""Certifies committed PeFLL runs by their unseen clients: CIFAR-10 of three sizes, and the data of writers.

    python -m benchmarks.held_out_certificates --out results

It reads the counts of unseen clients in result files, so it needs no data and no GPU. It writes
`certificates_held_out.json` and `certificates_held_out.md`. Each seed has a row of its own; nothing is pooled.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pefll.core.files import make_folder, write_json, write_whole
from pefll.report.certificate import bound_text, share_text
from pefll.runs.unseen import read_result
from pefll.training.certificate import DELTA, certify_summary
from pefll.training.summary import commit

# The settings of each data set were fixed before: they are those of Table 1 and of the pages on other data.
RUNS = (
    "cifar10-pefll-n100-embedding_convnet-client_lr_0.0005-bf16",
    "cifar10-pefll-n500-embedding_convnet-client_lr_0.0005-server_lr_0.0005-bf16",
    "cifar10-pefll-n1000-embedding_convnet-client_lr_0.0005-server_lr_0.0005-bf16",
    "femnist-pefll-n328-embedding_convnet-client_lr_0.005-server_lr_0.0005-bf16",
    "mnist_writers-pefll-n836-embedding_convnet-client_lr_0.0005-server_lr_0.0005-bf16",
)
COLUMNS = {
    "mean-betting": "betting (the certificate)",
    "mean-bernstein": "empirical Bernstein",
    "mean-hoeffding": "Hoeffding",
    "share-measured": "measured accuracy of 90%",
    "share-true": "true accuracy of 90%",
}


def certificates(folder: Path, delta: float = DELTA) -> list[dict[str, Any]]:
    """Return the file and the certificate of each committed run, ordered by data set and seed."""
    found = []
    for name in RUNS:
        files = sorted(folder.glob(f"{name}-seed*.json"), key=lambda path: int(path.stem.rpartition("seed")[2]))
        for path in files:
            certificate = certify_summary(read_result(path), path.name, delta)
            found.append({"file": path.name, "certificate": certificate.to_json()})
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return a table with a row for each run: the measured mean of unseen clients, and each lower bound."""
    heading = ("data", "clients", "seed", "unseen clients", "measured mean", *COLUMNS.values())
    lines = [f"| {' | '.join(heading)} |", f"|{' --- |' * 3}{' ---: |' * (len(heading) - 3)}"]
    for row in rows:
        certificate = row["certificate"]
        run, by_name = certificate["run"], {one["name"]: one for one in certificate["statements"]}
        mean = share_text(by_name["mean-betting"]["measured"])
        bounds = (bound_text(by_name[name]) if name in by_name else "—" for name in COLUMNS)
        cells = (run["dataset"], run["num_clients"], run["seed"], certificate["clients"], mean, *bounds)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Certify the runs and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder of result files")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder to write to")
    parser.add_argument("--delta", type=float, default=DELTA, help="the probability with which a bound fails")
    options = parser.parse_args()
    rows = certificates(options.results, options.delta)
    command = "python -m benchmarks.held_out_certificates --out results"
    content = {"command": command, "commit": commit(), "delta": options.delta, "certificates": rows}
    make_folder(options.out)
    write_json(options.out / "certificates_held_out.json", content)
    page = (
        f"# Certificates from unseen clients\n\nMade by `{command}`. Each bound holds with confidence "
        f"{100 - 100 * options.delta:g}% by itself; the best of several rows has no certificate. A dash says that "
        "there are too few unseen clients.\n\n"
    )
    write_whole(options.out / "certificates_held_out.md", (page + markdown(rows)).encode())
    print(markdown(rows))


if __name__ == "__main__":
    main()
