"""A run does not outlive the server that started it, whatever it is waiting for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import signal, time
from pefll.deploy.shutdown import exit_with_parent
signal.signal(signal.SIGINT, lambda *_: None)  # as training does, which stops after the round
with exit_with_parent(lambda sentence: print(sentence, flush=True)):
    print("waiting", flush=True)
    time.sleep(300)
"""
PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True).wait()"


def test_a_process_ends_when_the_one_that_started_it_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "waiting\n"
    parent.send_signal(signal.SIGKILL)
    said, _ = parent.communicate(timeout=30)  # until the last that has this pipe is gone, which is the child
    assert said == "the server that started this run is gone, so the run ends; start it again to resume it\n"


def test_it_ends_even_if_nobody_listens_any_more(tmp_path):
    place = tmp_path / "pid"
    child = f"import os; open({str(place)!r}, 'w').write(str(os.getpid()))\n" + CHILD
    parent = subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "waiting\n"
    parent.stdout.close()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    process = Path("/proc") / place.read_text()
    ends = time.monotonic() + 30
    while process.exists() and process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < ends, "it still lives"
        time.sleep(0.1)


def test_a_process_whose_parent_lives_goes_on_and_is_watched_no_longer_than_needed(monkeypatch):
    import threading

    from pefll.deploy import shutdown

    monkeypatch.setattr(shutdown, "_POLL_SECONDS", 0.01)
    before = threading.active_count()
    said: list[str] = []
    with shutdown.exit_with_parent(said.append):
        assert threading.active_count() == before + 1
        threading.Event().wait(0.1)
    for _ in range(100):
        if threading.active_count() == before:
            break
        threading.Event().wait(0.05)
    assert threading.active_count() == before
    assert not said
