"""Stand-ins for the packages trackio (0.40 to 0.43) and wandb (0.19.10 to 0.31), without networks and databases.

They have the packages' keywords and the rules that a logger may break, so that CI needs neither package.
"""

from __future__ import annotations

import json
import warnings
from contextvars import ContextVar
from types import ModuleType
from typing import Any


class Kept:
    """A run in a tracker's store.

    Attributes:
        rows: figures by step.
        given: the arguments of each `init` that opened it.
        finished: how often it was finished.
    """

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.given: list[dict[str, Any]] = []
        self.finished = 0


class Tracker(ModuleType):
    """A package with its store.

    Attributes:
        store: the runs, by project and ID (wandb) or name (trackio).
        fails: the step from which logging fails, as on a full disk.
        fails_to_finish: whether finishing a run fails.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.store: dict[tuple[str, str], Kept] = {}
        self.fails = 10**9
        self.fails_to_finish = False
        self.init = (wandb_init if name == "wandb" else trackio_init)(self)


class _Open:
    """A run that is open."""

    def __init__(self, tracker: Tracker, kept: Kept) -> None:
        self.tracker, self.kept, self.is_open = tracker, kept, True

    def keep(self, figures: Any, step: Any) -> None:
        assert self.is_open, "logged after the run was finished"
        assert isinstance(figures, dict)
        assert all(isinstance(key, str) for key in figures)
        assert type(step) is int
        json.dumps(figures, allow_nan=False)
        if step >= self.tracker.fails:
            raise OSError("no space left")
        self.kept.rows[step] = dict(figures)

    def end(self) -> None:
        if self.tracker.fails_to_finish:
            raise OSError("the server is gone")
        self.is_open = False
        self.kept.finished += 1


class WandBRun(_Open):
    """What `wandb.init` returns."""

    last = -1  # of this process; earlier ones are dropped

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Keep figures, unless the step is before the last one."""
        del commit
        if step is not None and step < self.last:
            warnings.warn(f"Tried to log to step {step} that is less than the current step {self.last}.", stacklevel=2)
            return
        self.keep(data, step)
        self.last = step if step is not None else self.last + 1

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        """End the run."""
        del exit_code, quiet
        self.end()


def wandb_init(tracker: Tracker) -> Any:
    """Return wandb's `init`."""
    active: list[WandBRun] = []

    def init(
        entity: str | None = None,
        project: str | None = None,
        dir: Any = None,
        id: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: Any = None,
        config: Any = None,
        config_exclude_keys: Any = None,
        config_include_keys: Any = None,
        allow_val_change: bool | None = None,
        group: str | None = None,
        job_type: str | None = None,
        mode: str | None = None,
        force: bool | None = None,
        reinit: Any = None,
        resume: Any = None,
        resume_from: str | None = None,
        fork_from: str | None = None,
        save_code: bool | None = None,
        tensorboard: bool | None = None,
        sync_tensorboard: bool | None = None,
        monitor_gym: bool | None = None,
        settings: Any = None,
    ) -> WandBRun:
        given = dict(locals())
        assert mode in ("online", "offline", "disabled", None)
        assert reinit in (True, False, None, "default", "return_previous", "finish_previous", "create_new")
        assert resume in (True, False, None, "allow", "never", "must", "auto")
        assert not any(letter in (id or "") for letter in "/\\#?%:"), "letters that IDs must not have"
        assert not any(letter in (project or "") for letter in "/\\#?%:")
        assert set(settings or {}) <= {"silent", "console", "quiet", "init_timeout"}
        assert isinstance(config, dict)
        json.dumps(config)
        if reinit != "create_new":
            for run in active:  # one run in a process
                run.end()
            active.clear()
        key = (project or "uncategorized", id or f"generated-{len(tracker.store)}")
        if resume != "allow":
            tracker.store.pop(key, None)
        kept = tracker.store.setdefault(key, Kept())
        kept.given.append(given)
        active.append(WandBRun(tracker, kept))
        return active[-1]

    return init


class TrackioRun(_Open):
    """What `trackio.init` returns."""

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep figures."""
        self.keep(metrics, step)

    def finish(self) -> None:
        """End the run."""
        self.end()


def trackio_init(tracker: Tracker) -> Any:
    """Return trackio's `init`."""
    current: ContextVar[TrackioRun | None] = ContextVar("current", default=None)

    def init(
        project: str,
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
        dataset_id: str | None = None,
        bucket_id: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str = "never",
        settings: Any = None,
        private: bool | None = None,
        embed: bool = True,
        auto_log_gpu: bool | None = None,
        gpu_log_interval: float = 10.0,
        webhook_url: str | None = None,
        webhook_min_level: Any = None,
    ) -> TrackioRun:
        given = dict(locals())
        if settings is not None:
            warnings.warn("settings is not used", stacklevel=2)
        if resume not in ("must", "allow", "never"):
            raise ValueError("resume must be one of: 'must', 'allow', or 'never'")
        if reserved := [key for key in config or {} if key.startswith("_")]:
            raise ValueError(f"Config key '{reserved[0]}' is reserved (keys starting with '_' are reserved)")
        json.dumps(config)
        if (before := current.get()) is not None and before.is_open:
            before.end()  # one run in a context
        key = (project, name or "")
        if name is None or (resume == "never" and key in tracker.store):
            key = (project, f"{name or 'generated'}-{len(tracker.store)}")
        kept = tracker.store.setdefault(key, Kept())
        kept.given.append(given)
        run = TrackioRun(tracker, kept)
        current.set(run)
        return run

    return init
