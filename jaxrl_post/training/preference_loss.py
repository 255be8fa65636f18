"""The loss of one micro-batch of examples: from token log-probs (or scores) to a scalar and its metrics.

Every metric is a sum with weights from the whole update, so metrics of micro-batches add up to the update's means.
Names are TRL's where it has one.

Legend: B rows, M targets of a row, E examples of a row, K answers of an example, S = E·K sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_post import config_offline as kinds
from jaxrl_post.objectives import preference
from jaxrl_post.objectives.preference import Pair
from jaxrl_post.objectives.reductions import sequence_length, sequence_sum, weighted_sum
from jaxrl_post.types_offline import OfflineBatch

Scalars = dict[str, jax.Array]
# (what the forward pass gives, micro-batch, constant of the update) -> loss, metrics
OfflineLoss = Callable[[Any, OfflineBatch, Any], tuple[jax.Array, Scalars]]


class Answers(NamedTuple):
    """Log-probs of a micro-batch's pairs, summed over each answer; lengths in tokens; all [B, E]."""

    pair: Pair
    chosen_length: jax.Array
    rejected_length: jax.Array
    live: jax.Array


# (answers, scalar constant) -> loss of each pair [B, E]
PairLoss = Callable[[Answers, jax.Array], jax.Array]


def offline_loss(algorithm: kinds.Algorithm) -> OfflineLoss:
    """The loss of an `algorithm` section. The constant is KTO's reference point and BCO's shift; others ignore it."""
    match algorithm:
        case kinds.SFT():
            return _sft
        case kinds.SFTDistillation():
            return _taught(algorithm.sft_weight)
        case kinds.RewardModel():
            return _reward_model(algorithm)
        case kinds.KTO():
            return _kto(algorithm)
        case _:
            return _pairs(algorithm)


def _sft(made: tuple[jax.Array, ...], batch: OfflineBatch, _: jax.Array) -> tuple[jax.Array, Scalars]:
    logp_BM, entropy_BM = made
    loss = weighted_sum(-logp_BM, batch.rows.mask, batch.rows.weight)
    return loss, {"loss": loss, "entropy": weighted_sum(entropy_BM, batch.rows.mask, batch.rows.weight)}


def _taught(sft_weight: float) -> OfflineLoss:
    """(1 − w) · divergence + w · NLL, of what `distillation_loss.taught_forward` makes."""

    def loss(made: Scalars, batch: OfflineBatch, _: Any) -> tuple[jax.Array, Scalars]:
        mean = lambda x_BM: weighted_sum(x_BM, batch.rows.mask, batch.rows.weight)
        known = {"logp", "entropy", "divergence"}
        means = {f"distillation/{name}": mean(x_BM) for name, x_BM in made.items() if name not in known}
        divergence, nll = mean(made["divergence"]), mean(-made["logp"])
        total = (1 - sft_weight) * divergence + sft_weight * nll
        means |= {"distillation/loss": divergence, "nll_loss": nll, "entropy": mean(made["entropy"])}
        return total, lax.stop_gradient({"loss": total} | means)

    return loss


def _pairs(algorithm: kinds.Algorithm) -> OfflineLoss:
    terms, beta = pair_terms(algorithm), reward_scale(algorithm)
    nll_weight = algorithm.losses.get("sft", 0.0) if isinstance(algorithm, kinds.DPO) else 0.0

    def loss(made: tuple[jax.Array, ...], batch: OfflineBatch, constant: jax.Array) -> tuple[jax.Array, Scalars]:
        logp_BM, _ = made
        answers, weight_BE = gather_pairs(logp_BM, batch), batch.examples.weight
        mean = lambda x_BE: weighted_sum(x_BE, answers.live, weight_BE)
        total = sum((weight * mean(term(answers, constant)) for weight, term in terms), jnp.float32(0))
        nll = weighted_sum(-logp_BM, batch.rows.mask, batch.rows.weight)
        total = total + nll_weight * nll
        stats = preference.reward_stats(_rewarded(answers, algorithm), answers.live, beta=beta)
        metrics = {
            "loss": total,
            "nll_loss": nll,
            "rewards/chosen": mean(stats["chosen"]),
            "rewards/rejected": mean(stats["rejected"]),
            "rewards/margins": mean(stats["margin"]),
            "rewards/accuracies": mean(stats["accuracy"]),
            "logps/chosen": mean(answers.pair.chosen),
            "logps/rejected": mean(answers.pair.rejected),
        }
        return total, lax.stop_gradient(metrics)

    return loss


def pair_terms(algorithm: kinds.Algorithm) -> list[tuple[float, PairLoss]]:
    """(weight, loss of each pair) of the losses that are per pair: one, but for a mixture of `kinds.DPO`."""
    a = algorithm
    match a:
        case kinds.DPO():
            return [(weight, _mixable(a, name)) for name, weight in a.losses.items() if name != "sft"]
        case kinds.IPO():
            return [(1.0, lambda x, _: preference.ipo(x.pair, x.live, beta=a.beta, **_lengths(x, a.length_normalise)))]
        case kinds.RobustDPO():
            return [
                (
                    1.0,
                    lambda x, _: preference.robust_dpo(x.pair, x.live, beta=a.beta, label_smoothing=a.label_smoothing),
                )
            ]
        case kinds.EXO():
            return [(1.0, lambda x, _: preference.exo(x.pair, x.live, beta=a.beta, label_smoothing=a.label_smoothing))]
        case kinds.ORPO():
            return [(1.0, lambda x, _: preference.orpo(*_means(x), x.live, weight=a.weight))]
        case kinds.SimPO():
            return [(1.0, lambda x, _: preference.simpo(*_means(x), x.live, beta=a.beta, gamma=a.gamma))]
        case kinds.CPO():
            return [(1.0, lambda x, _: _cpo(x, a))]
        case kinds.DiscoPOP():
            return [(1.0, lambda x, _: preference.discopop(x.pair, x.live, beta=a.beta, tau=a.tau))]
        case kinds.Hinge() | kinds.NCA() | kinds.BCO() | kinds.SPPO() | kinds.APOZero() | kinds.APODown():
            return [(1.0, _plain(a.kind, a.beta))]
    raise ValueError(f"algorithm.kind={algorithm.kind} has no loss of pairs")


def _mixable(algorithm: kinds.DPO, name: str) -> PairLoss:
    beta = algorithm.beta
    if name == "dpo":
        return lambda x, _: _dpo(x, algorithm)
    if name == "ipo":
        return lambda x, _: preference.ipo(x.pair, x.live, beta=beta, **_lengths(x, True))
    return _plain(name, beta)


def _plain(name: str, beta: float) -> PairLoss:
    if name == "bco":
        return lambda x, shift: preference.bco(x.pair, x.live, beta=beta, shift=shift)
    functions = {"hinge": preference.hinge, "nca": preference.nca, "sppo": preference.sppo}
    functions |= {"apo_zero": preference.apo_zero, "apo_down": preference.apo_down}
    function = functions[name]
    return lambda x, _: function(x.pair, x.live, beta=beta)


def _dpo(x: Answers, a: kinds.DPO) -> jax.Array:
    pair = x.pair
    if a.divergence != "reverse_kl":
        pair = preference.divergence_scores(pair, x.live, divergence=a.divergence, alpha=a.divergence_alpha)
    return preference.dpo(pair, x.live, beta=a.beta, label_smoothing=a.label_smoothing)


def _cpo(x: Answers, a: kinds.CPO) -> jax.Array:
    return preference.cpo(x.pair.chosen, x.pair.rejected, x.chosen_length, x.live, beta=a.beta, alpha=a.alpha)


def reward_scale(algorithm: kinds.Algorithm) -> float:
    """β of the implicit rewards that metrics show; ORPO's is its weight, as in TRL."""
    match algorithm:
        case kinds.ORPO():
            return algorithm.weight
        case kinds.FineTuning() | kinds.RewardModel():
            return 0.0
        case _:
            return algorithm.beta


def needs_reference(algorithm: kinds.Algorithm) -> bool:
    """Whether the loss is one of log-ratios to the model the run starts from."""
    return isinstance(algorithm, kinds.Referenced)


def needs_shift(algorithm: kinds.Algorithm) -> bool:
    """Whether the loss reads BCO's running mean of rewards."""
    return isinstance(algorithm, kinds.BCO) or (isinstance(algorithm, kinds.DPO) and "bco" in algorithm.losses)


def gather_pairs(logp_BM: jax.Array, batch: OfflineBatch) -> Answers:
    """Token log-probs summed into pairs: sequences 2e and 2e + 1 of a row are example e's chosen and rejected."""
    S = batch.examples.last.shape[-1]
    rows = batch.rows
    add = lambda x_BM: sequence_sum(x_BM, rows.mask, rows.sequence, S).reshape(x_BM.shape[0], S // 2, 2)
    logp_BE2, ref_BE2 = add(logp_BM), lax.stop_gradient(add(rows.ref_logp))
    length_BE2 = sequence_length(rows.mask, rows.sequence, S).reshape(logp_BE2.shape)
    pair = Pair(logp_BE2[..., 0], logp_BE2[..., 1], ref_BE2[..., 0], ref_BE2[..., 1])
    return Answers(pair, length_BE2[..., 0], length_BE2[..., 1], batch.examples.weight > 0)


def _rewarded(x: Answers, algorithm: kinds.Algorithm) -> Pair:
    """The log-probs that β turns into rewards: means where the loss is one of means. Without a reference it is 0."""
    if not isinstance(algorithm, kinds.ORPO | kinds.SimPO):
        return x.pair
    chosen_BE, rejected_BE = _means(x)
    return Pair(chosen_BE, rejected_BE, jnp.zeros_like(chosen_BE), jnp.zeros_like(rejected_BE))


def _means(x: Answers) -> tuple[jax.Array, jax.Array]:
    return x.pair.chosen / jnp.maximum(x.chosen_length, 1.0), x.pair.rejected / jnp.maximum(x.rejected_length, 1.0)


def _lengths(x: Answers, wanted: bool) -> dict[str, jax.Array]:
    return {"chosen_length_N": x.chosen_length, "rejected_length_N": x.rejected_length} if wanted else {}


def _kto(algorithm: kinds.KTO) -> OfflineLoss:
    def loss(made: tuple[jax.Array, ...], batch: OfflineBatch, point: jax.Array) -> tuple[jax.Array, Scalars]:
        rows, examples = batch.rows, batch.examples
        E = examples.weight.shape[-1]
        logp_BE = sequence_sum(made[0], rows.mask, rows.sequence, E)
        ref_BE = sequence_sum(rows.ref_logp, rows.mask, rows.sequence, E)
        live_BE = examples.weight > 0
        loss_BE = preference.kto(
            logp_BE,
            ref_BE,
            examples.desirable,
            live_BE,
            reference_point=point,
            beta=algorithm.beta,
            desirable_weight=algorithm.desirable_weight,
            undesirable_weight=algorithm.undesirable_weight,
        )
        total = weighted_sum(loss_BE, live_BE, examples.weight)
        good_BE, bad_BE = live_BE & examples.desirable, live_BE & ~examples.desirable
        mean = lambda x_BE, of_BE: weighted_sum(x_BE, of_BE, examples.share)
        reward_BE = algorithm.beta * (logp_BE - ref_BE)
        metrics = {
            "loss": total,
            "rewards/chosen": mean(reward_BE, good_BE),
            "rewards/rejected": mean(reward_BE, bad_BE),
            "rewards/margins": mean(reward_BE, good_BE) - mean(reward_BE, bad_BE),
            "logps/chosen": mean(logp_BE, good_BE),
            "logps/rejected": mean(logp_BE, bad_BE),
        }
        return total, lax.stop_gradient(metrics)

    return loss


def _reward_model(algorithm: kinds.RewardModel) -> OfflineLoss:
    def loss(made: tuple[jax.Array, ...], batch: OfflineBatch, _: jax.Array) -> tuple[jax.Array, Scalars]:
        (score_BS,) = made
        examples = batch.examples
        live_BE = examples.weight > 0
        chosen_BE, rejected_BE = score_BS[:, 0::2], score_BS[:, 1::2]
        loss_BE = preference.bradley_terry(
            chosen_BE, rejected_BE, live_BE, margin_N=examples.margin, centring=algorithm.centring
        )
        mean = lambda x_BE: weighted_sum(x_BE, live_BE, examples.weight)
        total = mean(loss_BE)
        metrics = {
            "loss": total,
            "accuracy": mean(chosen_BE > rejected_BE),
            "margin": mean(chosen_BE - rejected_BE),
            "mean_reward": mean((chosen_BE + rejected_BE) / 2),
        }
        return total, lax.stop_gradient(metrics)

    return loss
