"""The lock for state that all threads of a process share: torch's random generator and its tracer."""

from __future__ import annotations

import os
import threading

# A single lock: with several, two threads that take them in different orders would deadlock.
lock = threading.RLock()

# Without this, a child that is forked while another thread holds the lock would wait forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
