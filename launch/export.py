"""`python -m launch export RUN_DIR --to DIR`: a run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from jaxrl_post.data.tokenizer import load_tokenizer
from jaxrl_post.loops.decoder_shape import model_config
from jaxrl_post.loops.run_folder import Which, run_config, saved_params
from jaxrl_post.models.decoder import abstract
from jaxrl_post.models.folders import check_free
from jaxrl_post.models.huggingface_export import save_params
from jaxrl_post.models.zoo import resolve
from launch.byte_tokenizer import write_byte_tokenizer
from sharding.placement import placed_shapes


def export(run_dir: str | Path, to: str | Path, which: Which = None) -> None:
    """Write the weights of a complete checkpoint, the newest unless told, in the dtype they are kept in, with config
    and tokenizer.

    Works on the host's memory, so the run may still be going on its accelerators.
    Raises: ValueError for a folder that is no run, one of a reward model or without checkpoint, and as `save_params`.
    """
    jax.config.update("jax_platforms", "cpu")
    run_dir = Path(run_dir)
    config = run_config(run_dir)
    check_free(Path(to))
    if config.algorithm.kind == "reward_model":
        raise ValueError(
            f"{run_dir} trained a reward model, whose scalar head no Hugging Face language model has: export a run of "
            "another algorithm.kind"
        )
    source = None if config.model.path is None else resolve(config.model.path)
    model = model_config(config, source, load_tokenizer(source).vocab_size)
    host, (_, shapes, _) = SingleDeviceSharding(jax.devices("cpu")[0]), abstract(model)
    params, step = saved_params(run_dir, placed_shapes(shapes, jax.tree.map(lambda _: host, shapes)), which)
    with tempfile.TemporaryDirectory() as scratch:
        if source is None:
            write_byte_tokenizer(Path(scratch))
        save_params(to, params, model, source or Path(scratch))
    print(f"wrote step {step} of {run_dir} to {to}", file=sys.stderr)
