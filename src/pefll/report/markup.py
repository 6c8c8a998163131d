"""Texts and figures in Markdown and LaTeX."""

from __future__ import annotations

import re

from pefll.report.runs import MISSING

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    }
)


def markdown(text: str) -> str:
    """Return a text in which Markdown finds no marks."""
    return re.sub(r"([\\|*_<\[\]`])", r"\\\1", text)


def latex(text: str) -> str:
    """Return a text as LaTeX."""
    return (
        text.translate(_LATEX)
        .replace("±", r"$\pm$")
        .replace("*:", r"$^*$:")
        .replace("p <", "$p$ $<$")
        .replace(MISSING, "---")
    )


def markdown_figure(text: str, *, best: bool) -> str:
    """Return a figure in Markdown; the best one is bold."""
    return f"**{markdown(text)}**" if best else markdown(text)


def latex_figure(text: str, *, best: bool, worse: bool) -> str:
    """Return a figure in LaTeX; the best one is bold, and a worse one has a star."""
    return (rf"\textbf{{{latex(text)}}}" if best else latex(text)) + ("$^*$" if worse else "")
