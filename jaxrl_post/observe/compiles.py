"""How many XLA programs were built: after the first steps the answer should be none, so a rise is worth a look."""

from __future__ import annotations

from jax import monitoring

EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts programs built (compiled, or loaded from the persistent cache) while it is open, and the seconds spent.

    `with CompileCounter() as compiles: … compiles.collect()`.
    """

    def __init__(self) -> None:
        self._count, self._seconds = 0, 0.0

    def start(self) -> None:
        monitoring.register_event_duration_secs_listener(self._on_event)

    def close(self) -> None:
        monitoring.unregister_event_duration_listener(self._on_event)

    def collect(self) -> dict[str, float]:
        """`compile/count` and `compile/seconds` since the last call."""
        metrics = {"compile/count": self._count, "compile/seconds": self._seconds}
        self._count, self._seconds = 0, 0.0
        return metrics

    def __enter__(self) -> CompileCounter:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == EVENT:
            self._count += 1
            self._seconds += duration_secs
