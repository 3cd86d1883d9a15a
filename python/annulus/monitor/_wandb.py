"""Weights & Biases: what happened since the last step, beside the run's own metrics."""

from annulus.monitor import _events
from annulus.monitor._readers import optional


class WandbExporter:
    """Logs what the ranks of this process did since the last `log` to a run of Weights & Biases. Needs the package wandb.

    `run`: the program's own; without it one is made by `wandb.init(**init)` and finished by `close`. With mode="offline"
    nothing is sent anywhere; `wandb sync` can do so later.
    """

    def __init__(self, run=None, **init):
        if run is None:
            run = optional("wandb", "wandb", type(self).__name__).init(**init)
            self._own = True
        elif init:
            raise TypeError(
                f"WandbExporter: a run is given, and so are arguments for a new one: {', '.join(init)}"
            )
        else:
            self._own = False
        _events.start()
        self.run = run
        self._before: dict[int, dict[str, float]] = _events.summary()
        self._clears = _events.clears()

    def log(self, step: int | None = None, **more) -> dict[str, float]:
        """Logs, and returns, annulus/rank0/compute_seconds, .../waited and the like, and `more` beside them."""
        metrics: dict[str, float] = {}
        if self._clears != _events.clears():
            self._before, self._clears = {}, _events.clears()
        now = _events.summary()
        for rank, row in now.items():
            before = self._before.get(rank, {})
            change = {key: value - before.get(key, 0) for key, value in row.items() if key != "waited"}
            change["waited"] = _events.waited(change)
            metrics |= {f"annulus/rank{rank}/{key}": value for key, value in change.items()}
        self._before = now
        self.run.log(metrics | more, step=step)
        return metrics

    def close(self) -> None:
        """Finishes the run, if it was made here. Idempotent."""
        if self._own:
            self._own = False
            self.run.finish()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
