"""The lock for what a process has only once, and threads therefore share: torch's random generator, its tracer, ..."""

from __future__ import annotations

import os
import threading

# One lock for all of it: with several, two threads that take them in different orders would wait for each other.
lock = threading.RLock()

# A process that is forked while another thread holds the lock would wait for it forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
