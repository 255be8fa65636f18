"""Writes trl_fixtures.json: losses and metrics that TRL's own trainers compute from fixed log-probs.

Needs a virtual environment of its own, with torch and trl, not the one of this project:
    python tests/objectives/make_trl_fixtures.py
The trainers' loss methods run unbound, on a stand-in for the trainer and a model that returns the log-probs given.
"""

from __future__ import annotations

import collections
import json
import pathlib
import types

import torch
import trl
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

LENGTHS = {"chosen": [3, 1, 4, 2], "rejected": [2, 4, 4, 1]}
WIDTH = 5
NAMES = ("chosen", "rejected", "ref_chosen", "ref_rejected")
DPO_CASES = [
    {"loss_types": ["sigmoid"], "beta": 0.1},
    {"loss_types": ["sigmoid"], "beta": 0.7},
    {"loss_types": ["robust"], "beta": 0.3, "label_smoothing": 0.1},
    {"loss_types": ["hinge"], "beta": 0.3},
    {"loss_types": ["ipo"], "beta": 0.3},
    {"loss_types": ["exo_pair"], "beta": 0.3, "label_smoothing": 1e-3},
    {"loss_types": ["nca_pair"], "beta": 0.3},
    {"loss_types": ["bco_pair"], "beta": 0.3},
    {"loss_types": ["sppo_hard"], "beta": 0.3},
    {"loss_types": ["sft"], "beta": 0.3},
    {"loss_types": ["sigmoid", "bco_pair", "sft"], "beta": 0.3, "loss_weights": [0.8, 0.2, 1.0]},
]


def draw(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [N, WIDTH], 0 past each answer's length, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(WIDTH)[None] < torch.tensor(lengths)[:, None]
    logp = -0.1 - 3 * torch.rand(len(lengths), WIDTH, generator=generator, dtype=torch.float64)
    return logp * mask, mask


def outputs(logp: torch.Tensor) -> types.SimpleNamespace:
    zeros = torch.zeros_like(logp)
    return types.SimpleNamespace(log_probs=logp, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def stand_in(**fields: object) -> types.SimpleNamespace:
    same = lambda x: x
    accelerator = types.SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same)
    return types.SimpleNamespace(
        accelerator=accelerator,
        model=types.SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        ld_alpha=None,
        use_weighting=False,
        f_divergence_type="reverse_kl",
        **fields,
    )


def with_first(mask: torch.Tensor) -> torch.Tensor:
    """The mask of token ids, one wider than that of predictions."""
    return torch.cat([torch.zeros(len(mask), 1, dtype=mask.dtype), mask], dim=1).long()


def dpo(case: dict, tokens: dict[str, torch.Tensor], masks: dict[str, torch.Tensor]) -> dict:
    trainer = stand_in(
        loss_types=case["loss_types"],
        loss_weights=case.get("loss_weights", [1.0]),
        beta=case["beta"],
        label_smoothing=case.get("label_smoothing", 0.0),
    )
    mask = with_first(torch.cat([masks["chosen"], masks["rejected"]]))
    inputs = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": tokens["ref_chosen"].sum(1),
        "ref_rejected_logps": tokens["ref_rejected"].sum(1),
    }
    logp = torch.cat([tokens["chosen"], tokens["rejected"]])
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs(logp), inputs, False)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    shown = {name: value for name, value in metrics.items() if name.startswith(("rewards/", "logps/"))}
    return case | {"loss": float(loss), "metrics": shown}


def kto(tokens: dict[str, torch.Tensor], masks: dict[str, torch.Tensor]) -> dict:
    options = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    labels = [True, False, False, True]
    trainer = stand_in(loss_type="kto", calculate_KL=True, **options)
    trainer._compute_kl_logps = types.MethodType(KTOTrainer._compute_kl_logps, trainer)
    mask = with_first(masks["chosen"])
    other = with_first(masks["rejected"])
    inputs = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "KL_input_ids": torch.full_like(other, 2),
        "KL_attention_mask": torch.ones_like(other),
        "KL_completion_mask": other,
        "label": torch.tensor(labels),
        "ref_logps": tokens["ref_chosen"].sum(1),
        "ref_KL_logps": tokens["ref_rejected"].sum(1),
    }
    raised = tokens["rejected"] + 0.9 * masks["rejected"]  # so that the reference point is above 0
    model = lambda input_ids, **_: outputs(raised if input_ids[0, 0] == 2 else tokens["chosen"])
    loss = KTOTrainer._compute_loss(trainer, model, inputs, False)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    shown = {name: value for name, value in metrics.items() if name.startswith(("rewards/", "logps/", "kl"))}
    return options | {"labels": labels, "other": raised.tolist(), "loss": float(loss), "metrics": shown}


def reference_free(tokens: dict[str, torch.Tensor], masks: dict[str, torch.Tensor]) -> dict:
    """Losses of each pair: SimPO and ORPO's odds-ratio term on means, CPO's term on sums."""
    sums = [tokens[side].sum(1) for side in ("chosen", "rejected")]
    means = [tokens[side].sum(1) / masks[side].sum(1) for side in ("chosen", "rejected")]
    plain = {"alpha": 0.0, "label_smoothing": 0.0}
    simpo = stand_in(loss_type="simpo", beta=2.0, simpo_gamma=0.5, **plain)
    cpo = stand_in(loss_type="sigmoid", beta=0.3, **plain)
    return {
        "simpo": {"beta": 2.0, "gamma": 0.5, "loss": CPOTrainer.cpo_loss(simpo, *means)[0].tolist()},
        "cpo": {"beta": 0.3, "loss": CPOTrainer.cpo_loss(cpo, *sums)[0].tolist()},
        "orpo": {"weight": 0.3, "term": (-ORPOTrainer.odds_ratio_loss(stand_in(beta=0.3), *means)[0]).tolist()},
    }


def main() -> None:
    drawn = {name: draw(LENGTHS[name.removeprefix("ref_")], seed) for seed, name in enumerate(NAMES)}
    tokens = {name: logp for name, (logp, _) in drawn.items()}
    masks = {name: mask for name, (_, mask) in drawn.items()}
    fixture = {
        "made_by": "tests/objectives/make_trl_fixtures.py",
        "trl": trl.__version__,
        "torch": torch.__version__,
        "lengths": LENGTHS,
        "logp": {name: logp.tolist() for name, logp in tokens.items()},
        "dpo": [dpo(case, tokens, masks) for case in DPO_CASES],
        "kto": kto(tokens, masks),
        **reference_free(tokens, masks),
    }
    path = pathlib.Path(__file__).with_name("trl_fixtures.json")
    path.write_text(json.dumps(fixture) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
