"""Without what only Unix systems have, the package is imported and the serial engine trains in one process."""

from __future__ import annotations

import subprocess
import sys

TRAIN = """
import asyncio, importlib, multiprocessing, os, signal, socket, subprocess, sys  # these know what they do without
import numpy, rich.progress, safetensors.torch, sklearn.datasets, torch, typer
import torch.func

for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None
for name in ("fork", "getuid", "geteuid", "getpgid", "killpg", "register_at_fork", "sched_getaffinity", "setsid",
             "sysconf", "O_CLOEXEC", "O_NOFOLLOW", "O_DIRECTORY"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "pthread_sigmask"):
    if hasattr(signal, name):
        delattr(signal, name)

import pefll
import pefll.cli

samples = pefll.load_samples("digits", sys.argv[1])
federation = pefll.make_federation(samples, partition="by-class 2", clients=6, seed=0)
quick = {"rounds": 2, "local_steps": 2, "clients_per_round": 2, "engine": "serial", "device": "cpu", "processes": 2}
run = pefll.fit(federation, "fedavg", out=sys.argv[2], **quick)
print(run.summary["processes"], pefll.load(sys.argv[2]).summary["rounds"])
"""


def test_two_rounds_without_unix(tmp_path):
    command = [sys.executable, "-c", TRAIN, tmp_path / "data", tmp_path / "run"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["1", "2"]
    assert (tmp_path / "run" / "summary.json").is_file()
