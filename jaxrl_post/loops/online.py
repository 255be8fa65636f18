"""The online loop: sample → reward → advantage → update, read top to bottom.

P prompts a step, G samples each, N = P·G.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_post import recipes
from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.config import Config
from jaxrl_post.data.prompts import PromptStream
from jaxrl_post.loops.job import Job, build, initial_params, rollout_params
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.measures import Metrics, sample_metrics, speed_metrics
from jaxrl_post.models.decoder import Params
from jaxrl_post.objectives.advantages import group_advantages
from jaxrl_post.observe.compiles import CompileCounter
from jaxrl_post.observe.metrics import METRICS, MetricsWriter
from jaxrl_post.observe.plot import plot_curves
from jaxrl_post.observe.progress import Phases, Progress
from jaxrl_post.rollout.sampler import Rollout, SampleOptions, Sampler
from jaxrl_post.training.state import TrainState
from jaxrl_post.types import Prompt, StopReason, Trajectory
from sharding.placement import bytes_per_device

log = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Train as the config says, from the newest checkpoint of its run folder if there is one.

    Writes RUN_DIR/{config.yaml, metrics.jsonl, rollouts/, checkpoints/, reward.png}.
    Raises: ValueError, FileNotFoundError for what the user can mend, before any step and before anything is written.
    """
    job = build(config)
    run_dir = Path(config.run_dir)
    checkpoints = Checkpointer(run_dir / "checkpoints", config.checkpoint.keep_last)
    done = _last_step(checkpoints, config)
    if done >= config.steps:
        print(f"{run_dir} is at step {done} of {config.steps} already: give more `steps`, or another `run_dir`")
        return
    stream = PromptStream(job.train_prompts, config.data.prompts_per_step, config.seed, config.data.shuffle)
    sampler = Sampler(job.graphdef, job.model, job.mesh, job.stop_ids)
    learner, state = _start(job, checkpoints, stream, done)
    _write_config(config, run_dir)

    resumed = done if done > 0 else None
    with MetricsWriter(run_dir, resumed) as writer, Progress(config.steps) as progress, CompileCounter() as compiles:
        for line in _introduction(job, learner, state, done):
            progress.note(line)
        phases = Phases()
        if config.evaluation.enabled and job.held_out and not done:
            writer.write(0, _note(progress, evaluate(job, sampler, state.params)))
            phases.collect()
        for step in range(done + 1, config.steps + 1):
            prompts = stream.next()
            with phases("gen"):
                rollout = sample(job, sampler, rollout_params(job, state.params), prompts, step)
            with phases("reward"):
                texts, rewards_N = grade(job, prompts, rollout)
            with phases("adv"):
                trajectories = to_trajectories(job, prompts, rollout, rewards_N)
            state, learned = learner.learn(state, trajectories, phases)

            advantages_N = np.array([t.advantage for t in trajectories])
            metrics = {"training/global_step": step, **learned}
            metrics |= sample_metrics(prompts, rollout, rewards_N, advantages_N, job.prompt_width)
            if _due(step, config.evaluation.every, config.steps) and config.evaluation.enabled and job.held_out:
                with phases("testing"):
                    metrics |= _note(progress, evaluate(job, sampler, state.params))
            if _due(step, config.checkpoint.every, config.steps):
                with phases("save_checkpoint"):
                    checkpoints.save(step, state._asdict(), {"data": stream.state()})
            if config.dump_rollouts:
                writer.write_rollouts(step, _dump(prompts, rollout, texts, rewards_N, advantages_N))
            metrics |= phases.collect() | compiles.collect()
            metrics |= speed_metrics(metrics["perf/total_num_tokens"], metrics["timing_s/step"], job.mesh.size)
            writer.write(step, metrics)
            progress.update(step, metrics)
        checkpoints.close()
        plot_curves(run_dir / METRICS, run_dir / "reward.png")
        progress.note(_conclusion(run_dir))


def sample(job: Job, sampler: Sampler, params: Params, prompts: Sequence[Prompt], step: int) -> Rollout:
    """G completions of every prompt, drawn with this step's noise."""
    options = job.config.rollout
    asked = SampleOptions(
        samples_per_prompt=options.samples_per_prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        slots=options.slots,
        refill=options.refill,
    )
    ids = [prompt.ids for prompt in prompts]
    return sampler.generate(params, ids, asked, seed=job.config.seed, step=step, width=job.prompt_width)


def grade(job: Job, prompts: Sequence[Prompt], rollout: Rollout) -> tuple[list[str], np.ndarray]:
    """The completions as text, and a reward for each, float64 [N]."""
    texts = [job.tokenizer.decode(c.ids) for c in rollout.completions]
    return texts, np.array(job.reward([prompts[c.prompt] for c in rollout.completions], texts))


def to_trajectories(job: Job, prompts: Sequence[Prompt], rollout: Rollout, rewards_N: np.ndarray) -> list[Trajectory]:
    """Completions with the advantage over their group. Stop reasons, not widths, tell which were cut."""
    algorithm = job.config.algorithm
    groups_N = np.array([c.prompt for c in rollout.completions], np.int32)
    advantages_N = _advantages(np.float32(rewards_N), groups_N, algorithm.normalize_by_std)
    return [
        Trajectory(
            group=c.prompt,
            prompt_ids=prompts[c.prompt].ids,
            response_ids=c.ids,
            logp=c.logp,
            advantage=float(advantage),
            train=not (algorithm.drop_truncated and c.stop is StopReason.LENGTH),
        )
        for c, advantage in zip(rollout.completions, np.asarray(advantages_N), strict=True)
    ]


def evaluate(job: Job, sampler: Sampler, params: Params) -> Metrics:
    """Mean reward of one greedy completion for each held-out prompt."""
    greedy = SampleOptions(max_new_tokens=job.config.rollout.max_new_tokens, temperature=0.0)
    ids = [prompt.ids for prompt in job.held_out]
    params = rollout_params(job, params)
    rollout = sampler.generate(params, ids, greedy, seed=job.config.seed, step=0, width=job.prompt_width)
    _, rewards_N = grade(job, job.held_out, rollout)
    return {f"val-core/{job.task_name}/acc/mean@1": float(rewards_N.mean())}


_advantages = jax.jit(group_advantages, static_argnums=2)


def _last_step(checkpoints: Checkpointer, config: Config) -> int:
    """The step to go on from, 0 for a new run. A new run does not start in a folder that holds checkpoints."""
    newest = checkpoints.latest()
    if newest is not None and not config.checkpoint.resume:
        raise ValueError(
            f"run_dir={config.run_dir} holds checkpoints up to step {newest} and checkpoint.resume=false would write "
            "over them: choose another run_dir, or checkpoint.resume=true"
        )
    return newest or 0


def _start(job: Job, checkpoints: Checkpointer, stream: PromptStream, done: int) -> tuple[Learner, TrainState]:
    """Weights from the model for a new run, from the checkpoint otherwise; the reference is the model in both."""
    if not done:
        fresh = initial_params(job)
        learner = Learner(job, reference=fresh)
        return learner, learner.start(fresh)
    learner = Learner(job, reference=initial_params(job) if job.config.algorithm.kl.coef else None)
    arrays, host = checkpoints.restore(done, learner.abstract_state()._asdict())
    stream.restore(host["data"])
    return learner, TrainState(**arrays)


def _write_config(config: Config, run_dir: Path) -> None:
    """The resolved config; where a resumed run changes it, say what."""
    path, text = run_dir / "config.yaml", recipes.dump(config)
    before = path.read_text(encoding="utf-8") if path.exists() else text
    changed = sorted(set(text.splitlines()) - set(before.splitlines()))
    if changed:
        log.warning("%s changes: %s", path, "; ".join(line.strip() for line in changed))
    path.write_text(text, encoding="utf-8")


def _due(step: int, every: int, steps: int) -> bool:
    return step == steps or bool(every and step % every == 0)


def _note(progress: Progress, metrics: Metrics) -> Metrics:
    for name, value in metrics.items():
        progress.note(f"held-out {name} = {value:.3f} (greedy)")
    return metrics


def _introduction(job: Job, learner: Learner, state: TrainState, done: int) -> Iterator[str]:
    config, mesh = job.config, job.mesh
    axes = " × ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    held = bytes_per_device(state, jax.tree.map(lambda x: x.sharding, state)).per_device / 2**30
    yield (
        f"{job.model.family} {job.model.parameter_count() / 1e6:.1f}M parameters, {job.model.dtype} compute on {axes} "
        f"({jax.devices()[0].device_kind}); weights and optimizer {held:.2f} GiB a device"
    )
    yield (
        f"{config.data.prompts_per_step} prompts × {config.rollout.samples_per_prompt} samples a step from "
        f"{len(job.train_prompts)} prompts of {job.task_name}; update rows {learner.shape.rows} × "
        f"{learner.shape.length} tokens, up to {learner.shape.micro_batches} micro-batches"
    )
    yield f"{'resuming after step ' + str(done) if done else 'starting'}; outputs in {config.run_dir}"


def _conclusion(run_dir: Path) -> str:
    return (
        f"done. curve: {run_dir / 'reward.png'}  metrics: {run_dir / METRICS}  samples: {run_dir / 'rollouts'}  "
        f"checkpoints: {run_dir / 'checkpoints'}"
    )


def _dump(
    prompts: Sequence[Prompt], rollout: Rollout, texts: Sequence[str], rewards_N: np.ndarray, advantages_N: np.ndarray
) -> Iterator[dict[str, Any]]:
    for c, text, reward, advantage in zip(rollout.completions, texts, rewards_N, advantages_N, strict=True):
        prompt = prompts[c.prompt]
        yield {
            "prompt": prompt.text,
            "completion": text,
            "reward": float(reward),
            "advantage": float(advantage),
            "stop": c.stop.name.lower(),
            "prompt_ids": list(prompt.ids),
            "ids": c.ids.tolist(),
            "logp": c.logp.tolist(),
            "row": prompt.row,
        }
