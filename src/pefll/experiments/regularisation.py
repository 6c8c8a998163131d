"""Compares regularisation strengths of all three networks (the paper's `tab:reg_parameter`)."""

from __future__ import annotations

from pefll.experiments.experiment import CIFAR10, Compared, Experiment, Panel, Point, Row, Statement

CELL = CIFAR10[0]
THETA = (0.0, 5e-5, 5e-3, 5e-1)
BOTH = (0.0, 1e-5, 1e-3)  # λ_h = λ_v from the header of the paper's table; the paper's text has other values
# Algorithm 2 (sgd) sums the clients' updates and has no server learning rate. It diverges with Table 1's client_lr.
SERVERS: dict[str, dict[str, object]] = {
    "adam": {"server_optimizer": "adam"},
    "sgd": {"server_optimizer": "sgd", "client_lr": 1e-4},
}
PAPER = {
    0.0: ((87.4, 1.1), (87.4, 1.0), (88.4, 0.6)),
    5e-5: ((88.7, 0.7), (88.7, 0.6), (88.8, 0.3)),
    5e-3: ((87.8, 0.8), (87.6, 0.8), (87.5, 0.5)),
    5e-1: ((82.5, 1.5), (83.8, 1.1), (86.2, 0.4)),
}
ROBUST = 2.0  # percentage points; the paper's means for λ_θ up to 5e-3 differ by up to 1.4


def _name(server: str, theta: float, both: float) -> str:
    return f"{server}-{theta:g}-{both:g}"


def _point(server: str, theta: float, both: float, group: str = "seen", measure: str = "masked") -> Point:
    return Point(_name(server, theta, both), CELL, group, measure)


def _panel(server: str, group: str, measure: str) -> Panel:
    quoted = (group, measure) == ("seen", "masked")
    lines = [
        (
            f"{theta:g}",
            [
                _point(server, theta, both, group, measure)._replace(paper=PAPER[theta][place] if quoted else None)
                for place, both in enumerate(BOTH)
            ],
        )
        for theta in THETA
    ]
    words = f"{group} clients, {'with' if measure == 'masked' else 'without'} label masking"
    return Panel(f"Server {server}: {words}", "λ_θ, and λ_h = λ_v:", [f"{both:g}" for both in BOTH], lines)


EXPERIMENT = Experiment(
    name="regularisation",
    title="Regularisation",
    about="PeFLL on CIFAR-10 with 100 clients. The λ are those of the paper's objective, so the weight decay of "
    "local SGD is 2λ_θ. The published code may have used λ_θ itself as weight decay. The values of λ_h = λ_v are "
    "from the table's header; the text has 0, 5e-5 and 5e-3. The published code runs Adam on the server. `sgd` is "
    "Algorithm 2, lines 16 and 17, with a client learning rate of 1e-4; it diverges with the 5e-4 of Table 1. The "
    "paper does not say whether its figures use label masking. The figures of its other two ablations do, so we "
    "compare with masked figures.",
    cells=(CELL,),
    rows=tuple(
        Row(
            _name(server, theta, both),
            settings=changes | {"lambda_theta": theta, "lambda_h": both, "lambda_v": both},
        )
        for server, changes in SERVERS.items()
        for theta in THETA
        for both in BOTH
    ),
    panels=[
        _panel(server, group, measure)
        for server in SERVERS
        for group in ("seen", "unseen")
        for measure in ("masked", "per_sample")
    ],
    statements=tuple(
        statement
        for server in SERVERS
        for statement in (
            Statement(
                f"Server {server}: accuracy is robust (within {ROBUST:g} points) for λ_θ up to 5e-3",
                "tab:reg_parameter",
                [
                    Compared(_point(server, theta, both), _point(server, 5e-5, 1e-3), -ROBUST, ROBUST)
                    for theta in THETA[:3]
                    for both in BOTH
                    if (theta, both) != (5e-5, 1e-3)
                ],
            ),
            Statement(
                f"Server {server}: some regularisation of the hypernetwork helps new clients",
                "tab:reg_parameter",
                [
                    Compared(_point(server, theta, 1e-3, "unseen"), _point(server, theta, 0.0, "unseen"))
                    for theta in THETA[:3]
                ],
            ),
            Statement(
                f"Server {server}: some regularisation of clients' models helps",
                "tab:reg_parameter",
                [Compared(_point(server, 5e-5, both), _point(server, 0.0, both)) for both in BOTH],
            ),
            Statement(
                f"Server {server}: a very large λ_θ underfits",
                "tab:reg_parameter",
                [Compared(_point(server, 5e-5, both), _point(server, 5e-1, both)) for both in BOTH],
            ),
        )
    ),
)
