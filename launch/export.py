"""`python -m launch export RUN_DIR --to DIR`: a run's newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from jaxrl_post import recipes
from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.data.tokenizer import load_tokenizer
from jaxrl_post.loops.network import model_config
from jaxrl_post.models.decoder import abstract
from jaxrl_post.models.folders import check_free
from jaxrl_post.models.huggingface_export import save_params
from jaxrl_post.models.zoo import resolve
from launch.byte_tokenizer import write_byte_tokenizer


def export(run_dir: str | Path, to: str | Path) -> None:
    """Write the weights of the newest complete checkpoint, in the dtype they are kept in, with config and tokenizer.

    Works on the host's memory, so the run may still be going on its accelerators.
    Raises: ValueError for a folder that is no run, one of a reward model or without checkpoint, and as `save_params`.
    """
    jax.config.update("jax_platforms", "cpu")
    run_dir = Path(run_dir)
    if not (run_dir / "config.yaml").is_file():
        raise ValueError(f"{run_dir} is not the folder of a run: it has no config.yaml; give the recipe's run_dir")
    check_free(Path(to))
    config = recipes.load(run_dir / "config.yaml")
    if config.algorithm.kind == "reward_model":
        raise ValueError(
            f"{run_dir} trained a reward model, whose scalar head no Hugging Face language model has: export a run of "
            "another algorithm.kind"
        )
    if not (run_dir / "checkpoints").is_dir():
        raise ValueError(
            f"{run_dir} has no checkpoints yet: a run writes one every checkpoint.every steps and at its end"
        )
    source = None if config.model.path is None else resolve(config.model.path)
    model = model_config(config, source, load_tokenizer(source).vocab_size)
    checkpoints = Checkpointer(run_dir / "checkpoints", config.checkpoint.keep_last)
    step = checkpoints.latest()
    if step is None:
        raise ValueError(f"{run_dir / 'checkpoints'} holds no complete checkpoint yet")
    host = SingleDeviceSharding(jax.devices("cpu")[0])
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host), abstract(model)[1])
    arrays, _ = checkpoints.restore(step, {"params": shapes}, partial=True)
    checkpoints.close()
    with tempfile.TemporaryDirectory() as scratch:
        if source is None:
            write_byte_tokenizer(Path(scratch))
        save_params(to, arrays["params"], model, source or Path(scratch))
    print(f"wrote step {step} of {run_dir} to {to}", file=sys.stderr)
