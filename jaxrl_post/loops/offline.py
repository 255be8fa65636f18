"""The offline loop: examples → (reference) → update, read top to bottom."""

from __future__ import annotations

import functools
from pathlib import Path

from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.data.stream import Stream
from jaxrl_post.loops.introduction import introduction
from jaxrl_post.loops.measures import Metrics
from jaxrl_post.loops.network import initial_params
from jaxrl_post.loops.offline_job import OfflineJob, build
from jaxrl_post.loops.offline_learner import OfflineLearner
from jaxrl_post.loops.offline_reference import reference_scores
from jaxrl_post.loops.out_of_memory import memory_explained
from jaxrl_post.loops.run_folder import check_processes, due, host_named, last_step, write_config
from jaxrl_post.loops.running import running
from jaxrl_post.loops.saving import Saves
from jaxrl_post.loops.stopping import STOPPED, Stop
from jaxrl_post.loops.teachers import Teachers
from jaxrl_post.observe.metrics import METRICS
from jaxrl_post.observe.plot import OFFLINE, plot_curves
from jaxrl_post.observe.progress import Phases, Progress
from jaxrl_post.observe.watchdog import Watchdog
from jaxrl_post.run_dir import Claim
from jaxrl_post.training.state import TrainState
from jaxrl_post.types_offline import Example
from sharding.processes import is_first, together

CURVE = "curve.png"


def run(config: OfflineConfig) -> None:
    """Train as the config says, from the newest checkpoint of its run folder if there is one.

    Writes RUN_DIR/{config.yaml, metrics.jsonl, checkpoints/, curve.png}.
    Raises: ValueError, FileNotFoundError for what the user can mend, before any step and before anything is written.
    """
    with Watchdog(config.watchdog_minutes):
        job = together(lambda: build(config))
        claim = together(lambda: Claim(config.run_dir, hold=is_first()))
        run_dir = claim.path
        teachers = Teachers(job.teachers)
        learner = OfflineLearner(job, teachers)
        checkpoints = Checkpointer(run_dir / "checkpoints", config.checkpoint.keep_last)
        done = last_step(checkpoints, config)
        saves = Saves(config.checkpoint, config.steps, bool(job.held_out))
        if done >= config.steps:
            print(f"{run_dir} is at step {done} of {config.steps} already: give more `steps`, or another `run_dir`")
            return
        stream = Stream(job.examples, config.data.examples_per_step, config.seed, config.data.shuffle)
        check_processes(config, stream, job.network.mesh)
        teachers.load()
        with memory_explained(config, job.network, learner.shape.rows, Phases()) as phases, phases("start"):
            state = _start(job, checkpoints, learner, stream, saves, done)
        write_config(config, run_dir)

    with Stop() as stop, running(config, job.network, learner.shape.rows, done, claim, checkpoints) as now:
        writer, progress, phases = now.writer, now.progress, now.phases
        for line in introduction(config, job.network, state, learner.shape.rows, _data(job), done):
            progress.note(line)
        if job.held_out and not done:
            writer.write(0, _note(progress, learner.evaluate(state.params, job.held_out, phases)))
            phases.collect()
        for step in range(done + 1, config.steps + 1):
            state, learned = learner.learn(state, stream.next(), phases)
            metrics = {"training/global_step": step, **learned}
            if job.held_out and due(step, config.evaluation.every, config.steps):
                with phases("testing"):
                    metrics |= _note(progress, learner.evaluate(state.params, job.held_out, phases))
            stopping = stop.agreed(saves.out_of_time())
            if saves.due(step, metrics) or stopping:
                with phases("save_checkpoint"):
                    saves.saved()
                    host = {"data": stream.state(), **learner.state(), **saves.state()}
                    checkpoints.save(step, state._asdict(), host, keep=saves.best_step)
            now.write(step, now.clocked(metrics))
            if stopping:
                progress.note(STOPPED.format(step=step))
                break
        checkpoints.wait()
        if is_first():
            plot_curves(run_dir / METRICS, run_dir / CURVE, OFFLINE)
        if not stopping:
            progress.note(
                f"done. curve: {run_dir / CURVE}  metrics: {run_dir / METRICS}  checkpoints: {run_dir / 'checkpoints'}"
            )


def _start(
    job: OfflineJob,
    checkpoints: Checkpointer,
    learner: OfflineLearner,
    stream: Stream[Example],
    saves: Saves,
    done: int,
) -> TrainState:
    """Weights from the model for a new run, from the checkpoint otherwise; the reference is the model in both."""
    fresh = functools.cache(lambda: initial_params(job.network, job.config.seed))
    if job.config.training.cache_reference:
        learner.keep_scores(reference_scores(job, learner, fresh))
    elif learner.needs_reference:
        learner.keep_reference(fresh())
    if not done:
        return learner.trained.start(fresh())
    arrays, host = checkpoints.restore(done, learner.trained.abstract_state()._asdict())
    with host_named(Path(job.config.run_dir), done):
        stream.restore(host["data"])
        learner.restore(host)
        saves.restore(host)
    return TrainState(**arrays)


def _note(progress: Progress, metrics: Metrics) -> Metrics:
    core = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
    progress.note("held-out " + "  ".join(f"{name} = {value:.4f}" for name, value in core.items()))
    return metrics


def _data(job: OfflineJob) -> str:
    data, report = job.config.data, job.report
    return (
        f"{data.examples_per_step} examples a step of {len(job.examples)} in {data.path}, {len(job.held_out)} held out "
        f"({report.dropped} dropped and {report.cut} cut by data.max_tokens)"
    )
