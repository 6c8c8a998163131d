"""`pefll flower ...`: sets up, trains and serves a federation of clients on other machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pefll.cli.console import err, out
from pefll.cli.options import ClientColumn, DataDir, Label
from pefll.core.errors import PefllError
from pefll.core.plugins import CODE, allow
from pefll.core.progress import say
from pefll.core.wording import counted
from pefll.data import CLIENT, LABEL

app = typer.Typer(
    no_args_is_help=True,
    help="Train with clients on other machines, with Flower: set up, serve, take part, personalise.\n\n"
    "Needs `pip install flwr==1.41.0`. See docs/deploy.md. Start with `pefll flower demo`.",
)

Hosts = Annotated[
    list[str] | None,
    typer.Option(help="Another name or address of the server's machine, for its certificate; may be repeated."),
]
FolderArgument = Annotated[Path, typer.Argument(help="The federation's folder.", metavar="FEDERATION")]


def need_flower() -> None:
    """Raise PefllError if Flower is not installed, or cannot start in this environment."""
    from pefll.engines.flower.protocol.environment import check_environment

    check_environment()
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise PefllError("real clients need Flower: pip install flwr==1.41.0", code="PEFLL-F401") from None


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder.", metavar="FEDERATION")],
    like: Annotated[
        str,
        typer.Option(
            help="Data like the clients', for shapes, classes and channel statistics: a path or a data set.",
            show_default="the digits of the demo",
        ),
    ] = "",
    clients: Annotated[str, typer.Option(help="Number of clients, or their names separated by commas.")] = "8",
    address: Annotated[str, typer.Option(help="The server's address for clients, host:port.")] = "127.0.0.1:8000",
    host: Hosts = None,
    method: Annotated[str, typer.Option(help="`pefll methods` lists them.")] = "pefll",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A hyper-parameter, NAME=VALUE; may be repeated.")
    ] = None,
    model: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
    task: Annotated[str, typer.Option(help="As in `pefll train`.", show_default="what fits the labels")] = "",
    rounds: Annotated[int, typer.Option(help="Rounds of training.")] = 100,
    clients_per_round: Annotated[int, typer.Option(help="Clients in a round.", show_default="5% of all")] = 0,
    sampling: Annotated[str, typer.Option(help="As in `pefll train`.")] = "uniform",
    lr_schedule: Annotated[str, typer.Option(help="As in `pefll train`.")] = "constant",
    server_lr_schedule: Annotated[str, typer.Option(help="As in `pefll train`.")] = "constant",
    eval_every: Annotated[int, typer.Option(help="Rounds between evaluations.")] = 10,
    quorum: Annotated[float, typer.Option(help="Share of a round's clients that must complete the round.")] = 0.5,
    exchange_seconds: Annotated[float, typer.Option(help="Most seconds for one reply.")] = 120.0,
    seed: Annotated[int, typer.Option(help="The seed of all random numbers.")] = 0,
    label: Label = LABEL,
    client_column: ClientColumn = CLIENT,
    data_dir: DataDir = Path("data"),
) -> None:
    """Make the folder of a federation: a Flower app with settings, certificates, a key per client, and a README.

    For example: `pefll flower init my-federation --like example.npz --clients hospital-1,hospital-2 --address
    fl.example.org:8000`

    A rate that falls over the rounds: `pefll flower init my-federation --rounds 300 --lr-schedule cosine`
    """
    need_flower()
    from pefll.deploy.folder import check_new, make_federation
    from pefll.deploy.plan import Plan
    from pefll.deploy.server_app import round_plan
    from pefll.deploy.setup import agreement_like, client_names, refused_by_default
    from pefll.engines.flower.server.terms import Terms

    names = client_names(clients)
    allow(sampling, lr_schedule, server_lr_schedule)
    agreed = agreement_like(
        like or "digits",
        data_dir,
        method=method,
        pairs=settings or [],
        model=model,
        num_clients=len(names),
        seed=seed,
        label=label,
        client=client_column,
        task=task,
    )
    plan = Plan(
        agreed,
        names,
        rounds=rounds,
        clients_per_round=clients_per_round,
        eval_every=eval_every,
        sampling=sampling,
        lr_schedule=lr_schedule,
        server_lr_schedule=server_lr_schedule,
        terms=Terms(exchange_seconds=exchange_seconds, round_seconds=max(600.0, 6 * exchange_seconds), quorum=quorum),
    )
    if plan.clients_per_round > len(names):
        raise PefllError(
            f"--clients-per-round is {clients_per_round:,}, but the federation has {counted(len(names), 'client')}",
            code="PEFLL-C008",
        )
    for option, number in (("--rounds", rounds), ("--eval-every", eval_every)):
        if number < 1:
            raise PefllError(f"{option} is {number:,}; it must be at least 1", code="PEFLL-C009")
    round_plan(plan)  # raises PefllError for a schedule or a sampling that the method cannot follow
    check_new(folder, address)
    for sentence in refused_by_default(agreed):
        say(err, sentence)
    make_federation(folder, plan, address, host or [])
    say(out, f"{folder}: a federation of {counted(len(names), 'client')} for {method}, model {agreed.model}")
    if not like:
        say(out, "Its clients must have 8x8 digits, as in the demo; for other data, use --like example.npz")
    if own := [text for text in (sampling, lr_schedule, server_lr_schedule) if ":" in text]:
        say(out, f"The server runs your code: set {CODE}={','.join(own)} in its environment")
    say(out, f"Next: pefll flower server {folder}; the files for each client are in {folder}/clients/NAME")


@app.command()
def server(
    folder: FolderArgument,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all networks. [default: the address's host]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen on behind a proxy. [default: the address's port]", min=1, max=65535),
    ] = None,
) -> None:
    """Run the server: Flower's SuperLink with TLS, for clients with a key in the folder. Ctrl-C ends it.

    It keeps its state in FEDERATION/.flower and can be started again. Commands to the server need a secret in that
    folder, so run them as the same user on the same machine: `pefll flower run FEDERATION`.
    """
    need_flower()
    from pefll.deploy.foreground import serve

    serve(folder, host, err, port)


@app.command()
def run(
    folder: FolderArgument,
    run_config: Annotated[
        list[str] | None,
        typer.Option(help="Override a setting of FEDERATION/pyproject.toml, NAME=VALUE; may be repeated."),
    ] = None,
) -> None:
    """Train with the connected clients; a stopped run resumes from its last checkpoint.

    Run it on the server's machine as the user who runs the server. For example: `pefll flower run my-federation`
    """
    need_flower()
    from pefll.deploy.foreground import check_nothing_runs, start_app

    check_nothing_runs(folder)
    sys.exit(start_app(folder, run_config or [], err))


@app.command()
def client(
    folder: Annotated[Path, typer.Argument(help="The client's own folder, or the federation's.", metavar="FOLDER")],
    data: Annotated[
        Path,
        typer.Option(
            help="This client's samples: .npz, .csv, .parquet, or a folder class/*.png. They stay here.",
            envvar="PEFLL_DATA",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="The client's name; needed if FOLDER is the federation's.")] = None,
    label: Label = LABEL,
    model: Annotated[
        Path | None, typer.Option(help="The file for the personal model. [default: FOLDER/model.safetensors]")
    ] = None,
    counts: Annotated[
        bool,
        typer.Option(
            help="Tell the server the number of samples at the start. Scores contain it anyway, and so do updates of "
            "methods that weight clients by samples."
        ),
    ] = True,
    code: Annotated[
        list[str] | None,
        typer.Option(
            help="Other methods and models that the server may use, package.module:Name, separated by commas. They "
            "must be installed here, and you trust them; may be repeated.",
            envvar=CODE,
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods that may run here, separated by commas. [default: as in client.toml]")
    ] = None,
    min_samples: Annotated[
        int | None,
        typer.Option(min=0, help="Send nothing made from a batch of fewer samples. [default: 8]"),
    ] = None,
    allow_few: Annotated[
        bool | None,
        typer.Option(help="Also use a split with fewer samples, if all its samples are used.", show_default="no"),
    ] = None,
    numbers_per_sample: Annotated[
        float | None,
        typer.Option(min=0, help="Most numbers in a descriptor per sample used for it; 0 for no limit. [default: 1]"),
    ] = None,
) -> None:
    """Take part with this machine's data: run Flower's SuperNode. Ctrl-C ends it.

    The owner of the data, not the server, decides what a client refuses: see docs/deploy.md.

    For example: `pefll flower client hospital-7 --data samples.npz`
    """
    need_flower()
    from pefll.deploy.foreground import take_part

    limits = {
        "methods": None if methods is None else tuple(_listed(methods)),
        "min_samples": min_samples,
        "allow_few": allow_few,
        "numbers_per_sample": numbers_per_sample,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    take_part(folder, name, data, label, model, counts, err, _listed(",".join(code or [])), given)


def _listed(text: str) -> list[str]:
    """Return names that are separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


@app.command()
def add(folder: FolderArgument, name: Annotated[str, typer.Argument(help="The new client's name.")]) -> None:
    """Add a new client, which took no part in training; a running server accepts it at once.

    For example: `pefll flower add my-federation hospital-9`
    """
    need_flower()
    from pefll.deploy.folder import add_client

    bundle = add_client(folder, name)
    say(out, f"{bundle.folder}: hand it to {name}, then: pefll flower client {name} --data samples.npz")


@app.command()
def renew(
    folder: FolderArgument,
    host: Hosts = None,
    address: Annotated[
        str | None, typer.Option(help="The server's new address for clients, host:port.", show_default="as before")
    ] = None,
) -> None:
    """Make a new certificate for the server, from the same authority; clients need nothing new.

    With --address the server moves to another host or port. Clients then need the new address.
    """
    need_flower()
    from pefll.deploy.certificates import expiry, make_certificates
    from pefll.deploy.folder import change_address, server_address

    if address is not None:
        for place in change_address(folder, address):
            say(out, f"{place}: {address}")
        say(out, f"Clients that have their folder already must write {address} into their client.toml")
    make_certificates(folder / "server", [server_address(folder).rpartition(":")[0], *(host or [])])
    say(
        out,
        f"The certificate is valid until {expiry(folder / 'server' / 'server.crt'):%Y-%m-%d}; restart the server",
    )


@app.command()
def simulate(
    folder: FolderArgument,
    data: Annotated[
        Path,
        typer.Option(help="A folder with data for each client: NAME.npz, NAME.csv, NAME.parquet, or NAME/class/*."),
    ],
    rounds: Annotated[int, typer.Option(help="Number of rounds to simulate.")],
    label: Label = LABEL,
) -> None:
    """Train the first rounds on this machine with stand-ins for the clients' data; real clients then continue.

    For example: `pefll flower simulate my-federation --data stand-ins --rounds 90`, then `pefll flower run
    my-federation`. The run's summary, history and log name the simulated rounds.
    """
    need_flower()
    from pefll.deploy.simulation import simulate as run_simulation

    run_simulation(folder, data, rounds, err, label)
    say(
        out,
        f"{folder}/run: {counted(rounds, 'round')} simulated; once real clients are connected, pefll flower run "
        f"{folder} continues with them",
    )


@app.command()
def personalize(folder: FolderArgument) -> None:
    """Make a model for every connected client, new clients too.

    With PeFLL this takes two exchanges: a descriptor up and a model down. The client writes its model to its own disk.
    """
    need_flower()
    from pefll.deploy.foreground import start_app

    sys.exit(start_app(folder, ['task="personalize"'], err))


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="The folder for everything.")] = Path("flower-demo"),
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds of training with these clients.")] = 1,
    simulated: Annotated[int, typer.Option(help="Rounds simulated in this process before that.")] = 200,
) -> None:
    """Show everything on this machine: simulate a run, continue it with real clients, and make a new client's model.

    The server and every client are separate processes with TLS and keys. The data is digits.
    """
    need_flower()
    from pefll.deploy.demo import demo as run_demo
    from pefll.deploy.shutdown import exit_on_signals

    with exit_on_signals() as signals:
        run_demo(folder, clients, rounds, out, simulated)
    if signals:
        say(err, "stopped; everything that was started is ended")
        raise typer.Exit(128 + signals[0])
