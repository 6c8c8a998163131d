"""`pefll methods` lists methods. `pefll check-method` checks a method against the rules for methods."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from pefll.cli.console import out
from pefll.cli.options import parse_settings
from pefll.core.plugins import allow
from pefll.methods import METHODS, hyperparameters, method_class, typed_settings
from pefll.runs.titles import title_of


def methods(
    name: Annotated[
        str | None, typer.Argument(help="One method, or your own: package.module:Class. [default: all]")
    ] = None,
) -> None:
    """Explain the methods and their hyper-parameters, for `pefll train --set NAME=VALUE`.

    For example: `pefll methods pefll`
    """
    allow(name)
    for each in [name] if name else METHODS:
        defaults = hyperparameters(each)
        kind: Any = method_class(each)
        about = escape((kind.__doc__ or "").splitlines()[0])
        out.print(f"[bold]{each}[/bold] ({escape(title_of(each))}): {about}", highlight=False)
        notes: dict[str, str] = {}
        for variation_of in reversed(kind.__mro__):  # a subclass explains only what it adds
            lines = (variation_of.__doc__ or "").splitlines()[1:]
            notes |= dict(line.strip().split(": ", 1) for line in lines if line.startswith("        ") and ": " in line)
        table = Table("hyper-parameter", "default", "meaning", box=None, padding=(0, 2, 0, 2))
        for key, value in defaults.items():
            table.add_row(key, str(value), escape(notes.get(key, "")))
        out.print(table)
        out.print()


def check_method(
    name: Annotated[str, typer.Argument(help="A method, or your own: package.module:Class.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A hyper-parameter, NAME=VALUE; may be repeated. Few steps make the checks quick."),
    ] = None,
) -> None:
    """Check a method against the rules for methods, on every engine; the exit code is 1 if it breaks a rule.

    For example: `pefll check-method mymodule:MyMethod --set local_steps=3`
    """
    from pefll.training import checking

    allow(name)
    method_class(name)  # an unknown name is an error, not a broken rule
    findings = checking.check_method(name, typed_settings(name, parse_settings(settings)) if settings else {})
    for rule, problem, not_tried in findings:
        if problem or not_tried:
            answer = "[red]no [/red]" if problem else "[yellow]not tried[/yellow]"
            out.print(f"{answer} {escape(rule)}: {escape(problem or not_tried or '')}")
        else:
            out.print(f"[green]yes[/green] {rule}")
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)
