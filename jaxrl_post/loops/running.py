"""What is open around the steps of every loop, and what each step writes down of itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.loops.measures import Metrics, speed_metrics
from jaxrl_post.loops.network import Network
from jaxrl_post.loops.out_of_memory import memory_explained
from jaxrl_post.loops.run_folder import reporting
from jaxrl_post.observe.alerts import Alerts, as_metrics
from jaxrl_post.observe.compiles import CompileCounter
from jaxrl_post.observe.metrics import MetricsWriter, NoWriter
from jaxrl_post.observe.progress import Phases, Progress
from jaxrl_post.observe.watchdog import Watchdog
from jaxrl_post.training.packing import PackShape


class Closable(Protocol):
    def close(self) -> object: ...


class Running(NamedTuple):
    """Where a run writes and shows its metrics, and what times its phases and counts its compiles."""

    writer: MetricsWriter | NoWriter
    progress: Progress
    compiles: CompileCounter
    phases: Phases
    devices: int

    def clocked(self, metrics: Metrics) -> Metrics:
        """A step's metrics with its times, compiles and speed, all of since the last call."""
        metrics = metrics | self.phases.collect() | self.compiles.collect()
        return metrics | speed_metrics(metrics["perf/total_num_tokens"], metrics["timing_s/step"], self.devices)

    def write(self, step: int, metrics: Metrics, alerts: Alerts | None = None) -> None:
        """Write and show a step's metrics, and what alerts find among them. Raises: as `Alerts.check`."""
        reasons = alerts.look(metrics) if alerts else {}
        metrics = metrics | as_metrics(reasons)
        self.writer.write(step, metrics)
        self.progress.update(step, metrics)
        for reason in reasons.values():
            self.progress.note(f"alert: step {step}: {reason}")
        if alerts:
            alerts.check()


@contextlib.contextmanager
def running(
    config: Config | OfflineConfig, network: Network, shape: PackShape, done: int, *held: Closable
) -> Iterator[Running]:
    """While it is open phases are timed and watched; at its end, however it ends, what is `held` is closed.

    Raises: OutOfMemoryError as `memory_explained`.
    """
    with (
        reporting(Path(config.run_dir), done, config.steps) as (writer, progress),
        CompileCounter() as compiles,
        Watchdog(config.watchdog_minutes) as watchdog,
        contextlib.ExitStack() as open_until,
    ):
        for one in held:
            open_until.callback(one.close)
        with memory_explained(config, network, shape, Phases(watchdog.enter)) as phases:
            yield Running(writer, progress, compiles, phases, network.mesh.size)
