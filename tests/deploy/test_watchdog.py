"""Nothing that was started outlives the process that started it, whatever signal ended that one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from pefll.deploy import watchdog
from pefll.deploy.shutdown import exit_on_signals
from tests.deploy.process_search import WORD, alive_with, wait_until

# Three processes: one, one that it starts in a session of its own, and one that ignores SIGTERM.
STARTER = """
import os, subprocess, sys, time
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("watchdog", sys.argv[2])  # by its file: the package takes long to import
module = module_from_spec(spec)
spec.loader.exec_module(module)
environment = os.environ | module.watchdog_environment()
sleeper = "import time; time.sleep(300)"
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + "time.sleep(300)"
nested = (
    "import subprocess, sys, time;"
    f"subprocess.Popen([sys.executable, '-S', '-c', {sleeper!r}], start_new_session=True); time.sleep(300)"
)
for code in (nested, deaf):
    subprocess.Popen([sys.executable, "-S", "-c", code], env=environment, start_new_session=True)
print("started", flush=True)
if sys.argv[1] == "end":
    sys.exit(0)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT, None])
def test_all_that_was_started_ends_with_the_process(number):
    ours = {WORD: uuid.uuid4().hex}
    words = [sys.executable, "-c", STARTER, "wait" if number else "end", watchdog.__file__]
    parent = subprocess.Popen(
        words, env=os.environ | ours, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "started\n"
    if number:
        wait_until(lambda: len(alive_with(ours)) == 5, 20)  # those three, the watchdog, and the parent
        parent.send_signal(number)
    parent.wait(20)
    wait_until(lambda: not alive_with(ours), 10)


def test_a_tag_is_found_and_only_that(tmp_path):
    value = uuid.uuid4().hex
    environment = os.environ | {watchdog.TAG: value}
    sleepers = [subprocess.Popen(["sleep", "60"], env=environment) for _ in range(2)]
    other = subprocess.Popen(["sleep", "60"], env=os.environ | {watchdog.TAG: value + "0"})
    try:
        assert sorted(watchdog.tagged_processes(value)) == sorted(process.pid for process in sleepers)
        watchdog.end_tagged(value)
        assert [process.wait(5) for process in sleepers] == [-signal.SIGTERM] * 2
        assert other.poll() is None
    finally:
        for process in (*sleepers, other):
            process.kill()
            process.wait()


def test_the_watchdog_needs_no_package():
    code = Path(watchdog.__file__).read_text()
    assert "pefll" not in "".join(line for line in code.splitlines() if line.startswith(("import", "from")))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_block_in_good_order_and_another_does_not_disturb_that(number):
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    ended = []
    with exit_on_signals() as came:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
            ended.append("too late")
        finally:
            os.kill(os.getpid(), signal.SIGHUP if came else 0)  # as a terminal that is closed sends it again
            ended.append("cleaned up")
    assert (came, ended) == ([number], ["cleaned up"])
    assert {each: signal.getsignal(each) for each in before} == before


def test_who_uses_nohup_stays_when_the_terminal_goes():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_signals() as came:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
        assert came == []
    finally:
        signal.signal(signal.SIGHUP, before)
