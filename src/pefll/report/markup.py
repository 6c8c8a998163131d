"""Texts and figures in Markdown and LaTeX."""

from __future__ import annotations

import re

from pefll.report.runs import MISSING

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        # The usual fonts of LaTeX show other letters for these, and some languages give " a meaning.
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': "''",
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
        "±": r"$\pm$",
        "²": "$^2$",
        MISSING: "---",
    }
)


def markdown(text: str) -> str:
    """Return a text on one line, in which Markdown finds no marks."""
    return re.sub(r"([\\|*_<>\[\]`~&$])", r"\\\1", _on_one_line(text))


def code(text: str) -> str:
    """Return a text on one line as code in Markdown, whatever backticks it has."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    mark, space = "`" * (longest + 1), " " if "`" in text else ""
    return f"{mark}{space}{_on_one_line(text)}{space}{mark}"


def latex(text: str) -> str:
    """Return a text on one line as LaTeX."""
    return _on_one_line(text).translate(_LATEX)


def latex_note(text: str) -> str:
    """Return a note or an interval of a table as LaTeX: with its star, and its variables in italics."""
    text = latex(text).replace("*: ", "$^*$: ").replace("over n seeds", "over $n$ seeds")
    text = re.sub(r"\bp \\textless\{\} ([0-9.]+)", r"$p < \1$", text)
    return re.sub(r"\bp = ([0-9.]+)", r"$p = \1$", text)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def markdown_figure(text: str, *, best: bool) -> str:
    """Return a figure in Markdown; the best one is bold."""
    return f"**{markdown(text)}**" if best else markdown(text)


def latex_figure(text: str, *, best: bool, worse: bool) -> str:
    """Return a figure in LaTeX; the best one is bold, and a worse one has a star."""
    return (rf"\textbf{{{latex(text)}}}" if best else latex(text)) + ("$^*$" if worse else "")
