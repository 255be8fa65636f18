"""The sampling half of the online loop: draws, grades and writes down, and learns nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxrl_post.config import Config
from jaxrl_post.data.curriculum import prompt_source
from jaxrl_post.loops.dumps import dump
from jaxrl_post.loops.gather import Gather
from jaxrl_post.loops.job import build
from jaxrl_post.loops.measures import part_metrics, sample_metrics
from jaxrl_post.loops.network import initial_params, rollout_params
from jaxrl_post.loops.packed import update_shape
from jaxrl_post.loops.run_folder import check_processes, write_config
from jaxrl_post.loops.running import running
from jaxrl_post.observe.alerts import Alerts
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.run_dir import Claim
from sharding.processes import is_first, together


def run_rollouts(config: Config) -> None:
    """`steps` rollouts of the recipe's own model, as before a first update: RUN_DIR/{metrics.jsonl, rollouts/}.

    Raises: ValueError, FileNotFoundError as `loops.online.run`, and for the folder of a run that has trained.
    """
    run_dir = Path(config.run_dir)
    if (run_dir / "checkpoints").exists():
        raise ValueError(f"run_dir={run_dir} holds a run's checkpoints: give rollouts without training another run_dir")
    job = together(lambda: build(config))
    network = job.network
    stream = prompt_source(job.train_prompts, config.data, config.seed)
    check_processes(config, stream, network.mesh)
    sampler = Sampler(network.graphdef, network.model, network.mesh, job.stop_ids, job.token_bytes)
    gather, shape = Gather(job, sampler, stream), update_shape(job, config.rollout.max_new_tokens)
    claim = together(lambda: Claim(config.run_dir, hold=is_first()))
    with running(config, network, shape, 0, claim, job.reward) as now:
        write_config(config, run_dir)
        params, alerts = rollout_params(network, initial_params(network, config.seed)), Alerts(config.alerts)
        for step in range(1, config.steps + 1):
            drawn, gathered = gather.next(params, step, now.phases)
            samples = drawn.graded()
            advantages_N = np.zeros(len(samples.texts))
            now.writer.write_rollouts(step, dump(samples, job.reward.names, advantages_N))
            metrics = sample_metrics(
                samples.prompts, samples.rollout, samples.rewards_N, advantages_N, job.prompt_width
            )
            metrics |= part_metrics(job.reward.names, samples.scores.heads_NK) | gathered
            now.write(step, now.clocked(metrics) | job.reward.collect(), alerts)
