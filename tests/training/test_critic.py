"""The critic's update alone: the same gradient however samples are split into rows and micro-batches."""

import jax
import numpy as np
from tiny_training import TINY, sgd, tiny_params, trajectories

from jaxrl_post.models import scalar_head
from jaxrl_post.models.decoder import abstract
from jaxrl_post.training.critic import make_critic_update, token_values
from jaxrl_post.training.packing import PackShape, pack
from jaxrl_post.training.state import init_state, state_shardings
from jaxrl_post.training.update import batch_shardings
from sharding import make_mesh


def updated(shape, share_prefix):
    """Parameters after one SGD update with rate 1, and its metrics."""
    mesh = make_mesh({}, jax.devices()[:1])
    graphdef, abstract_params, axes = abstract(TINY)
    weight = np.random.default_rng(1).standard_normal(TINY.hidden_size).astype(np.float32)
    params = {"decoder": tiny_params()[1], "head": {"weight": weight}}
    whole = {"decoder": abstract_params, "head": scalar_head.abstract_head(TINY)}
    shardings = state_shardings(whole, {"decoder": axes, "head": scalar_head.AXES}, sgd(1.0), mesh)
    placed = batch_shardings(shape, mesh)
    update = make_critic_update(
        token_values(graphdef, placed),
        sgd(1.0),
        value_clip=None,
        shardings=shardings,
        held_shardings={},
        batch_shardings=placed,
    )
    batch, n_micro, _ = pack(
        trajectories(), shape, aggregation="seq-mean-token-mean", share_prefix=share_prefix, keep_all=True
    )
    state, metrics, _ = update(init_state(params, sgd(1.0), shardings), batch, n_micro, {})
    return jax.device_get((state.params, metrics)), n_micro


def test_packing_and_micro_batches_leave_the_gradient_as_it_is():
    (alone, one_by_one), many = updated(PackShape(rows=1, length=24, targets=24, micro_batches=12), share_prefix=False)
    (packed, together), few = updated(PackShape(rows=4, length=64, targets=64, micro_batches=1), share_prefix=True)
    assert many > few == 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), alone, packed)
    for name in ("critic/vf_loss", "critic/vpred_mean", "critic/grad_norm"):
        np.testing.assert_allclose(one_by_one[name], together[name], rtol=1e-5)
    assert together["critic/grad_norm"] > 0.1
