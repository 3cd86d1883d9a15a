"""Weights & Biases: metrics of the ranks since the last step, in addition to the run's own metrics."""

from annulus.monitor import _events
from annulus.monitor._readers import optional


class WandbExporter:
    """Logs metrics of this process's ranks since the last `log` to a run of Weights & Biases. Needs the package wandb.

    `run`: a run of the program. Without it, `wandb.init(**init)` makes one, and `close` finishes it. With
    mode="offline" nothing is sent; `wandb sync` can send it later.
    """

    def __init__(self, run=None, **init):
        if run is None:
            run = optional("wandb", "wandb", type(self).__name__).init(**init)
            self._own = True
        elif init:
            raise TypeError(
                f"WandbExporter: expected either a run or arguments for a new one, found both: run, {', '.join(init)}"
            )
        else:
            self._own = False
        _events.start()
        self.run = run
        self._before: dict[int, dict[str, float]] = _events.summary()
        self._clears = _events.clears()

    def log(self, step: int | None = None, **more) -> dict[str, float]:
        """Logs and returns metrics such as annulus/rank0/compute_seconds and .../waited. Also logs `more`."""
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
        """Finishes the run if this exporter has made it. Idempotent."""
        if self._own:
            self._own = False
            self.run.finish()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
