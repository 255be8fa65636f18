"""Losses and metrics equal those of TRL's own trainers (objectives/make_trl_fixtures.py), through packing."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import config_offline as kinds
from jaxrl_post.objectives import preference
from jaxrl_post.training.offline_packing import example_shape, pack_examples
from jaxrl_post.training.preference_loss import offline_loss
from jaxrl_post.types_offline import Answer, Example

FIXTURES = json.loads(
    (pathlib.Path(__file__).parents[1] / "objectives" / "trl_fixtures.json").read_text(encoding="utf-8")
)
LENGTHS = FIXTURES["lengths"]
NAMES = {"sigmoid": "dpo", "robust": "robust_dpo", "exo_pair": "exo", "nca_pair": "nca", "bco_pair": "bco"}
NAMES |= {"sppo_hard": "sppo", "hinge": "hinge", "ipo": "ipo", "sft": "sft"}


def algorithm(case):
    names = [NAMES[name] for name in case["loss_types"]]
    options = {"beta": case["beta"]}
    if names == ["sft"] or len(names) > 1:
        weights = case.get("loss_weights", [1.0])
        return kinds.DPO(kind="dpo", losses=dict(zip(names, weights, strict=True)), **options)
    if "label_smoothing" in case:
        options["label_smoothing"] = case["label_smoothing"]
    classes = {"dpo": kinds.DPO, "robust_dpo": kinds.RobustDPO, "exo": kinds.EXO, "nca": kinds.NCA, "bco": kinds.BCO}
    classes |= {"sppo": kinds.SPPO, "hinge": kinds.Hinge, "ipo": kinds.IPO}
    return classes[names[0]](kind=names[0], **options)


def packed(sides, labels=None, length=9):
    """The fixture's answers as a batch, and its log-probs at the batch's targets: every token has an id of its own."""
    table, examples = {"logp": [0.0], "ref": [0.0]}, []
    for n in range(4):
        answers = []
        for side in sides:
            count = LENGTHS[side][n]
            first = len(table["logp"])
            table["logp"] += FIXTURES["logp"][side][n][:count]
            table["ref"] += FIXTURES["logp"][f"ref_{side}"][n][:count]
            answers.append(Answer(tuple(range(first, first + count)), (True,) * count))
        examples.append(Example((0,), tuple(answers), desirable=labels is None or labels[n]))
    sizes = [example.size for example in examples]
    shape = example_shape(sizes, len(sides), examples_per_step=4, tokens_per_microbatch=length, row_length=length)
    batch, n_micro, _ = pack_examples(examples, shape)
    assert n_micro > 1
    at = lambda name: np.array(table[name], np.float32)[batch.rows.target] * batch.rows.mask
    return batch._replace(rows=batch.rows._replace(ref_logp=at("ref"))), at("logp"), n_micro


def totals(algorithm, batch, logp, n_micro, constant=0.0):
    """Loss and metrics added up over micro-batches."""
    loss = offline_loss(algorithm)
    made = [
        loss(
            (jnp.asarray(logp[i]), jnp.zeros_like(logp[i])),
            jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), batch),
            jnp.float32(constant),
        )
        for i in range(n_micro)
    ]
    return sum(float(x) for x, _ in made), {k: sum(float(m[k]) for _, m in made) for k in made[0][1]}


@pytest.mark.parametrize("case", FIXTURES["dpo"], ids=lambda case: f"{'+'.join(case['loss_types'])}-{case['beta']}")
def test_losses_of_pairs(case):
    loss, metrics = totals(algorithm(case), *packed(("chosen", "rejected")))
    np.testing.assert_allclose(loss, case["loss"], rtol=2e-6)
    for name, value in case["metrics"].items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-6, atol=1e-6, err_msg=name)


def test_kto_with_its_reference_point():
    case = FIXTURES["kto"]
    other = np.array(case["other"]).sum(1) - np.array(FIXTURES["logp"]["ref_rejected"]).sum(1)
    point = preference.kto_reference_point(jnp.asarray(other), jnp.zeros(4), jnp.ones(4, bool))
    np.testing.assert_allclose(point, case["metrics"]["kl"], rtol=1e-6)
    assert case["metrics"]["kl"] > 0.1
    options = {name: case[name] for name in ("beta", "desirable_weight", "undesirable_weight")}
    batch, logp, n_micro = packed(("chosen",), case["labels"], length=6)
    loss, metrics = totals(kinds.KTO(kind="kto", **options), batch, logp, n_micro, point)
    np.testing.assert_allclose(loss, case["loss"], rtol=2e-6)
    for name in set(case["metrics"]) - {"kl"}:
        np.testing.assert_allclose(metrics[name], case["metrics"][name], rtol=2e-6, atol=1e-6, err_msg=name)


def test_reference_free_losses():
    """TRL adds the NLL of its whole batch to ORPO and CPO; here the terms of pairs are compared, NLL apart."""
    chosen_N, rejected_N = (np.array(FIXTURES["logp"][side]).sum(1) for side in ("chosen", "rejected"))
    lengths = [np.array(LENGTHS[side]) for side in ("chosen", "rejected")]
    means = [chosen_N / lengths[0], rejected_N / lengths[1]]
    batch = packed(("chosen", "rejected"))
    simpo, cpo, orpo = (FIXTURES[name] for name in ("simpo", "cpo", "orpo"))
    loss, metrics = totals(kinds.SimPO(kind="simpo", beta=simpo["beta"], gamma=simpo["gamma"]), *batch)
    np.testing.assert_allclose(loss, np.mean(simpo["loss"]), rtol=2e-6)
    np.testing.assert_allclose(metrics["rewards/chosen"], simpo["beta"] * means[0].mean(), rtol=2e-6)
    loss, _ = totals(kinds.CPO(kind="cpo", beta=cpo["beta"], alpha=0.0), *batch)
    np.testing.assert_allclose(loss, np.mean(cpo["loss"]), rtol=2e-6)
    loss, _ = totals(kinds.ORPO(kind="orpo", weight=orpo["weight"]), *batch)
    np.testing.assert_allclose(loss, np.mean(orpo["term"]) - means[0].mean(), rtol=2e-6)
