"""`pefll flower ...`: a federation of real clients, from an empty folder to personal models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.core.plugins import CODE
from pefll.core.progress import say
from pefll.core.wording import counted
from pefll.data import CLIENT, LABEL

out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)

app = typer.Typer(
    no_args_is_help=True,
    help="Real clients on other machines, with Flower: set up, serve, take part, personalise.\n\n"
    'Needs `pip install "pefll[flower]"`. See docs/deploy.md. Start with `pefll flower demo`.',
)

Label = Annotated[
    str, typer.Option(help="The label's column in a table, or array in an .npz.", show_default="label, in an .npz y")
]
FolderArgument = Annotated[Path, typer.Argument(help="The federation's folder.", metavar="FEDERATION")]


def need_flower() -> None:
    """Raise PefllError where Flower is not installed, or would not start in this environment."""
    from pefll.engines.flower.protocol.environment import check_environment

    check_environment()
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise PefllError("real clients need Flower: pip install 'pefll[flower]'", code="PEFLL-F401") from None


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder.", metavar="FEDERATION")],
    like: Annotated[
        str,
        typer.Option(
            help="Data of the same kind, for shapes, classes and channel statistics: a path or a name.",
            show_default="the digits of the demo",
        ),
    ] = "",
    clients: Annotated[str, typer.Option(help="How many clients, or their names with commas between them.")] = "8",
    address: Annotated[str, typer.Option(help="Where clients reach the server, host:port.")] = "127.0.0.1:8000",
    host: Annotated[
        list[str] | None,
        typer.Option(help="Another name or address of the server's machine, for its certificate; may be repeated."),
    ] = None,
    method: Annotated[str, typer.Option(help="`pefll methods` lists them.")] = "pefll",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A hyper-parameter, NAME=VALUE; may be repeated.")
    ] = None,
    model: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Rounds of training.")] = 100,
    clients_per_round: Annotated[int, typer.Option(help="Clients in a round.", show_default="5% of all")] = 0,
    quorum: Annotated[float, typer.Option(help="The share of a round's clients that must complete it.")] = 0.5,
    exchange_seconds: Annotated[float, typer.Option(help="How long one reply may take, in seconds.")] = 120.0,
    seed: Annotated[int, typer.Option(help="The seed of everything random.")] = 0,
    label: Label = LABEL,
    client_column: Annotated[str, typer.Option(help="The client's column in a table or .npz.")] = CLIENT,
    data_dir: Annotated[Path, typer.Option(help="Where data sets lie.")] = Path("data"),
) -> None:
    """Make a ready Flower app: settings, certificates, a key for each client, a README.

    For example: `pefll flower init my-federation --like example.npz --clients hospital-1,hospital-2 --address
    fl.example.org:8000`
    """
    need_flower()
    from pefll.deploy.folder import check_new, make_federation
    from pefll.deploy.plan import Plan
    from pefll.deploy.setup import agreement_like, client_names, refused_by_default
    from pefll.engines.flower.server.terms import Terms

    names = client_names(clients)
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
    )
    plan = Plan(
        agreed,
        names,
        rounds=rounds,
        clients_per_round=clients_per_round,
        terms=Terms(exchange_seconds=exchange_seconds, round_seconds=max(600.0, 6 * exchange_seconds), quorum=quorum),
    )
    if plan.clients_per_round > len(names):
        raise PefllError(
            f"--clients-per-round is {clients_per_round:,}, but the federation has {counted(len(names), 'client')}",
            code="PEFLL-C008",
        )
    if rounds < 1:
        raise PefllError(f"--rounds is {rounds:,}; a federation trains for at least one", code="PEFLL-C009")
    check_new(folder, address)
    for sentence in refused_by_default(agreed):
        say(err, sentence)
    make_federation(folder, plan, address, host or [])
    say(out, f"{folder}: a federation of {counted(len(names), 'client')} for {method}, model {agreed.model}")
    if not like:
        say(out, "Clients must have 8x8 digits, as the demo's: for other data make it anew, with --like example.npz")
    say(out, f"Next: pefll flower server {folder}; what each client needs is in {folder}/clients/NAME")


@app.command()
def server(
    folder: FolderArgument,
    host: Annotated[
        str | None, typer.Option(help="Where to listen: 0.0.0.0 for all networks. [default: the address's own]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Where to listen, for a proxy in front. [default: the address's own]", min=1, max=65535),
    ] = None,
) -> None:
    """Run the server: Flower's SuperLink with TLS, for the clients whose keys are in the folder; Ctrl-C ends it.

    What it knows is kept in FEDERATION/.flower, so that it can be started again. Commands to it need a secret, which
    is there, too: `pefll flower run FEDERATION`, by the same user on the same machine.
    """
    need_flower()
    from pefll.deploy.foreground import serve

    serve(folder, host, err, port)


@app.command()
def run(
    folder: FolderArgument,
    run_config: Annotated[
        list[str] | None,
        typer.Option(help="A setting of FEDERATION/pyproject.toml to override, NAME=VALUE; may be repeated."),
    ] = None,
) -> None:
    """Train with the clients that are connected; after a stop it goes on from the last checkpoint.

    On the server's machine, by the user who runs the server. For example: `pefll flower run my-federation`
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
    name: Annotated[
        str | None, typer.Option(help="The client's name; needed where FOLDER is the federation's.")
    ] = None,
    label: Label = LABEL,
    model: Annotated[
        Path | None, typer.Option(help="Where to write the personal model. [default: FOLDER/model.safetensors]")
    ] = None,
    counts: Annotated[
        bool,
        typer.Option(
            help="Tell the server at the start how many samples there are. Scores, and updates of methods that weight "
            "clients by samples, contain such numbers anyway."
        ),
    ] = True,
    code: Annotated[
        list[str] | None,
        typer.Option(
            help="Methods and models beside pefll's own that the server may name, package.module:Name with commas, "
            "installed here and trusted; may be repeated.",
            envvar=CODE,
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="The methods to take part in, with commas. [default: as in client.toml]")
    ] = None,
    min_samples: Annotated[
        int | None,
        typer.Option(min=0, help="Send nothing made from a batch of fewer samples. [default: 8]"),
    ] = None,
    allow_few: Annotated[
        bool | None,
        typer.Option(help="Use a split with fewer samples too, where all of it is used.", show_default="no"),
    ] = None,
    numbers_per_sample: Annotated[
        float | None,
        typer.Option(min=0, help="The most numbers of a descriptor for each sample behind it; 0 for any. [default: 1]"),
    ] = None,
) -> None:
    """Take part: Flower's SuperNode with this machine's data; Ctrl-C ends it.

    What it refuses is the owner's choice and never the server's: see docs/deploy.md.

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
    """Return names that have commas between them."""
    return [part.strip() for part in text.split(",") if part.strip()]


@app.command()
def add(folder: FolderArgument, name: Annotated[str, typer.Argument(help="The new client's name.")]) -> None:
    """Let one more client in, which was not there in training; a server that runs learns of it at once."""
    need_flower()
    from pefll.deploy.folder import add_client

    bundle = add_client(folder, name)
    say(out, f"{bundle.folder}: hand it to {name}, then: pefll flower client {name} --data samples.npz")


@app.command()
def renew(
    folder: FolderArgument,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Another name or address of the server's machine, for its certificate; may be repeated."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Where clients reach the server from now on, host:port.", show_default="as before"),
    ] = None,
) -> None:
    """Make a new certificate for the server, from the same authority: clients need nothing new.

    With --address the server moves, to another port for example: then clients need the new address.
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
        f"The server's certificate is good until {expiry(folder / 'server' / 'server.crt'):%Y-%m-%d}; start it again",
    )


@app.command()
def simulate(
    folder: FolderArgument,
    data: Annotated[
        Path,
        typer.Option(help="A folder with data for each client: NAME.npz, NAME.csv, NAME.parquet, or NAME/class/*."),
    ],
    rounds: Annotated[int, typer.Option(help="How many of the run's rounds.")],
    label: Label = LABEL,
) -> None:
    """Train the first rounds on this machine, with data that stands for the clients'; real clients then go on.

    For example: `pefll flower simulate my-federation --data stand-ins --rounds 90`, then `pefll flower run
    my-federation`. The run's summary, history and log say which rounds were simulated.
    """
    need_flower()
    from pefll.deploy.simulation import simulate as run_simulation

    run_simulation(folder, data, rounds, err, label)
    say(
        out,
        f"{folder}/run: {counted(rounds, 'round')} simulated; once real clients are there, pefll flower run {folder} "
        "goes on with them",
    )


@app.command()
def personalize(folder: FolderArgument) -> None:
    """Make a model for every client that is connected, also for those that were not there in training.

    With PeFLL these are two exchanges: a descriptor up, a model down, which the client writes to its own disk.
    """
    need_flower()
    from pefll.deploy.foreground import start_app

    sys.exit(start_app(folder, ['task="personalize"'], err))


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where everything goes.")] = Path("flower-demo"),
    clients: Annotated[int, typer.Option(help="How many clients.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds of training with them.")] = 1,
    simulated: Annotated[int, typer.Option(help="Rounds before them, simulated in this process.")] = 200,
) -> None:
    """Show all of it on this machine: a run is simulated, real clients go on with it, and a new client gets a model.

    The server and every client are processes of their own, with TLS and keys. The data is digits.
    """
    need_flower()
    from pefll.deploy.demo import demo as run_demo
    from pefll.deploy.shutdown import exit_on_signals

    with exit_on_signals() as signals:
        run_demo(folder, clients, rounds, out, simulated)
    if signals:
        say(err, "stopped; everything that was started is ended")
        raise typer.Exit(128 + signals[0])
