"""The online loop: gather (sample → reward) → credit → update, read top to bottom.

P prompts a step, G samples each, N = P·G.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.config import Config
from jaxrl_post.config_ppo import PPO
from jaxrl_post.data.curriculum import prompt_source
from jaxrl_post.loops.credit import Credit
from jaxrl_post.loops.critic import Critic
from jaxrl_post.loops.dumps import DumpedRollouts, dump
from jaxrl_post.loops.gather import Gather, grade, sample_greedily
from jaxrl_post.loops.introduction import introduction
from jaxrl_post.loops.job import Job, build
from jaxrl_post.loops.layouts import check_layouts
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.measures import Metrics, part_metrics, sample_metrics
from jaxrl_post.loops.metric_names import online_names
from jaxrl_post.loops.network import initial_params, rollout_params
from jaxrl_post.loops.out_of_memory import memory_explained
from jaxrl_post.loops.run_folder import check_processes, due, host_named, last_step, write_config
from jaxrl_post.loops.running import running
from jaxrl_post.loops.saving import Saves
from jaxrl_post.loops.stopping import STOPPED, Stop
from jaxrl_post.loops.taught_advantage import TaughtAdvantages
from jaxrl_post.loops.teachers import Teachers
from jaxrl_post.models.decoder import Params
from jaxrl_post.observe.alerts import Alerts
from jaxrl_post.observe.metrics import METRICS
from jaxrl_post.observe.plot import ONLINE, plot_curves
from jaxrl_post.observe.progress import Phases, Progress
from jaxrl_post.observe.watchdog import Watchdog
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.run_dir import Claim
from jaxrl_post.training.state import TrainState
from sharding.processes import is_first, together


def run(config: Config, rollouts: Path | None = None) -> None:
    """Train as the config says, from the newest checkpoint of its run folder if there is one.

    With `rollouts`, the folder of that name of another run, train on what was sampled there and sample nothing.
    Writes RUN_DIR/{config.yaml, metrics.jsonl, rollouts/, checkpoints/, reward.png}.
    Raises: ValueError, FileNotFoundError for what the user can mend, before any step and before anything is written.
    """
    with Watchdog(config.watchdog_minutes):
        job = together(lambda: build(config))
        claim = together(lambda: Claim(config.run_dir, hold=is_first()))
        run_dir = claim.path
        checkpoints = Checkpointer(run_dir / "checkpoints", config.checkpoint.keep_last)
        done = last_step(checkpoints, config)
        evaluates = config.evaluation.enabled and bool(job.held_out)
        saves = Saves(config.checkpoint, config.steps, evaluates, online_names(job, evaluates))
        if done >= config.steps:
            print(f"{run_dir} is at step {done} of {config.steps} already: give more `steps`, or another `run_dir`")
            return
        stream = prompt_source(job.train_prompts, config.data, config.seed)
        check_processes(config, stream, job.network.mesh)
        network = job.network
        sampler = Sampler(network.graphdef, network.model, network.mesh, job.stop_ids, job.token_bytes)
        teachers = Teachers(job.teachers)
        learner = Learner(job, teachers)
        gather = DumpedRollouts(job, rollouts, stream) if rollouts else Gather(job, sampler, stream)
        critic = Critic(job, config.algorithm) if isinstance(config.algorithm, PPO) else None
        distillation = config.algorithm.distillation
        taught = TaughtAdvantages(job, distillation, teachers, learner) if distillation else None
        credit = Credit(job, sampler, learner, critic, taught)
        teachers.load()
        with memory_explained(config, network, learner.shape, Phases()) as phases, phases("start"):
            state = _start(job, checkpoints, learner, gather, credit, critic, saves, done)
        write_config(config, run_dir)

    with Stop() as stop, running(config, network, learner.shape, done, claim, checkpoints, job.reward) as now:
        writer, progress, phases = now.writer, now.progress, now.phases
        for line in introduction(config, job.network, state, learner.shape, _data(job), done):
            progress.note(line)
        alerts = Alerts(config.alerts)
        if config.evaluation.enabled and job.held_out and not done:
            writer.write(0, _note(progress, evaluate(job, sampler, state.params)))
            phases.collect()
        for step in range(done + 1, config.steps + 1):
            params = rollout_params(job.network, state.params)
            if config.debug.check_layouts:
                check_layouts(state.params, params)
            samples, gathered = gather.next(params, step, phases)
            trajectories, credited = credit.assign(samples, state, params, phases)
            del params  # may be the state's own arrays, which the update is given for good
            state, learned = learner.learn(state, trajectories, phases)
            learned |= critic.learn(trajectories, state.params, phases) if critic else {}

            graded = zip(trajectories, samples.graded_N, strict=True)
            advantages_N = np.array([np.mean(t.advantage) for t, yes in graded if yes])
            samples = samples.graded()
            metrics = {"training/global_step": step, **learned}
            metrics |= sample_metrics(
                samples.prompts, samples.rollout, samples.rewards_N, advantages_N, job.prompt_width
            )
            metrics |= part_metrics(job.reward.names, samples.scores.heads_NK) | gathered | credited
            if due(step, config.evaluation.every, config.steps) and config.evaluation.enabled and job.held_out:
                with phases("testing"):
                    metrics |= _note(progress, evaluate(job, sampler, state.params))
            stopping = stop.agreed(saves.out_of_time())
            if saves.due(step, metrics) or stopping:
                with phases("save_checkpoint"):
                    saves.saved()
                    arrays = state._asdict() | (critic.arrays() if critic else {})
                    host = gather.state() | credit.state() | saves.state()
                    checkpoints.save(step, arrays, host, keep=saves.best_step)
            if config.dump_rollouts:
                writer.write_rollouts(step, dump(samples, job.reward.names, advantages_N))
            now.write(step, now.clocked(metrics) | job.reward.collect(), alerts)
            if stopping:
                progress.note(STOPPED.format(step=step))
                break
        checkpoints.wait()
        if is_first():
            plot_curves(run_dir / METRICS, run_dir / "reward.png", ONLINE)
        if not stopping:
            progress.note(_conclusion(run_dir))


def evaluate(job: Job, sampler: Sampler, params: Params) -> Metrics:
    """Mean reward of one greedy completion for each held-out prompt."""
    rollout = sample_greedily(job, sampler, rollout_params(job.network, params), job.held_out)
    _, scores = grade(job, job.held_out, rollout)
    parts = part_metrics(job.reward.names, scores.heads_NK, f"val-aux/{job.task_name}")
    means = {f"{name}@1": value for name, value in parts.items() if name.endswith("/mean")}
    return {f"val-core/{job.task_name}/acc/mean@1": float(scores.total_N.mean())} | means


def _start(
    job: Job,
    checkpoints: Checkpointer,
    learner: Learner,
    gather: Gather | DumpedRollouts,
    credit: Credit,
    critic: Critic | None,
    saves: Saves,
    done: int,
) -> TrainState:
    """Weights from the model for a new run, from the checkpoint otherwise; the reference is the model in both."""
    if not done:
        fresh = initial_params(job.network, job.config.seed)
        learner.keep_reference(fresh)
        if critic:
            critic.start(fresh)
        return learner.trained.start(fresh)
    if learner.needs_reference:
        learner.keep_reference(initial_params(job.network, job.config.seed))
    abstract = learner.trained.abstract_state()._asdict()
    arrays, host = checkpoints.restore(done, abstract | (critic.abstract_arrays() if critic else {}))
    with host_named(Path(job.config.run_dir), done):
        gather.restore(host)
        credit.restore(host)
        saves.restore(host)
    if critic:
        critic.restore(arrays)
    return TrainState(**{name: arrays[name] for name in abstract})


def _note(progress: Progress, metrics: Metrics) -> Metrics:
    for name, value in metrics.items():
        progress.note(f"held-out {name} = {value:.3f} (greedy)")
    return metrics


def _data(job: Job) -> str:
    config = job.config
    return (
        f"{config.data.prompts_per_step} prompts × {config.rollout.samples_per_prompt} samples a step from "
        f"{len(job.train_prompts)} prompts of {job.task_name}"
    )


def _conclusion(run_dir: Path) -> str:
    return (
        f"done. curve: {run_dir / 'reward.png'}  metrics: {run_dir / METRICS}  samples: {run_dir / 'rollouts'}  "
        f"checkpoints: {run_dir / 'checkpoints'}"
    )
