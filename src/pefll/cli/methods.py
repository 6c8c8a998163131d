"""`pefll methods` and `check-method`: what methods there are, and whether one keeps the rules."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from pefll.cli.console import out
from pefll.cli.options import parse_settings
from pefll.core.plugins import allow
from pefll.methods import METHODS, hyperparameters, method_class, typed_settings


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Only this method, or one of your own: package.module:Class.")
    ] = None,
) -> None:
    """Explain the methods and their hyper-parameters, for `pefll train --set NAME=VALUE`."""
    allow(name)
    for each in [name] if name else METHODS:
        defaults = hyperparameters(each)
        kind: Any = method_class(each)
        out.print(f"[bold]{each}[/bold]: {escape((kind.__doc__ or '').splitlines()[0])}", highlight=False)
        notes: dict[str, str] = {}
        for variation_of in reversed(kind.__mro__):  # a variation of a method explains only what it adds
            lines = (variation_of.__doc__ or "").splitlines()[1:]
            notes |= dict(line.strip().split(": ", 1) for line in lines if line.startswith("        ") and ": " in line)
        table = Table("hyper-parameter", "default", "meaning", box=None, padding=(0, 2, 0, 2))
        for key, value in defaults.items():
            table.add_row(key, str(value), escape(notes.get(key, "")))
        out.print(table)
        out.print()


def check_method(
    name: Annotated[str, typer.Argument(help="A method, or one of your own: package.module:Class.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A hyper-parameter, NAME=VALUE; may be repeated. Few steps make the checks quick."),
    ] = None,
) -> None:
    """Check that a method does what every method must, on every engine; exit code 1 where it does not."""
    from pefll.training import checking

    allow(name)
    method_class(name)  # a name that stands for nothing is no method that breaks a rule
    findings = checking.check_method(name, typed_settings(name, parse_settings(settings)) if settings else {})
    for rule, problem, not_tried in findings:
        if problem or not_tried:
            answer = "[red]no [/red]" if problem else "[yellow]not tried[/yellow]"
            out.print(f"{answer} {escape(rule)}: {escape(problem or not_tried or '')}")
        else:
            out.print(f"[green]yes[/green] {rule}")
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)
