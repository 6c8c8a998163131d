"""Before any test: Triton decides when it is imported whether it compiles kernels or interprets them."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec

import torch

# Whoever starts the tests in the background, or with nohup, hands ignored signals on to them and to all they start.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        with suppress(ValueError):  # not in the main thread
            signal.signal(number, usual)


def let_numbers_end_loops() -> None:
    """Mend Triton's interpreter: its numbers are arrays of one, of which new versions of numpy make no integer."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def interpret_untraced() -> None:
    """Let kernels run in Triton's interpreter without being measured: it is Python, and takes 2.5 times as long so."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def untraced(self, *arguments, **options):
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return launch(self, *arguments, **options)
        finally:
            sys.settrace(tracer)

    GridExecutor.__call__ = untraced


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        let_numbers_end_loops()
        interpret_untraced()
