"""The schema of offline recipes: fine-tuning, preference losses and reward models, from files instead of samples.

`algorithm.kind` tells them from online ones (`config.Config`); sections that mean the same are the same classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PositiveInt, model_validator

from jaxrl_post.config import Checkpoint, Config, Mesh, Model
from jaxrl_post.config_base import Count, Fraction, NonNegative, Positive, Section
from jaxrl_post.config_debug import OfflineDebug
from jaxrl_post.config_distillation import Divergence
from jaxrl_post.config_optimizer import Optimizer
from jaxrl_post.config_teachers import Taught

Smoothing = Annotated[float, Field(ge=0.0, lt=0.5)]
Mixable = Literal["dpo", "hinge", "ipo", "nca", "bco", "sppo", "apo_zero", "apo_down", "sft"]


class FineTuning(Section):
    aggregation: Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"


class SFT(FineTuning):
    """Supervised fine-tuning: −log p of what the assistant says, end of turn included."""

    kind: Literal["sft"]


class SFTDistillation(FineTuning, Divergence, Taught):
    """Distillation on given text: a divergence to the teacher's distribution at each token of the answers, mixed with
    fine-tuning on the tokens themselves (arXiv:1503.02531)."""

    kind: Literal["sft_distillation"]
    divergence: Literal["forward_kl", "reverse_kl", "js"] = "forward_kl"
    """KL(teacher ‖ student), KL(student ‖ teacher), or GKD's generalised Jensen–Shannon (arXiv:2306.13649)."""
    sft_weight: Fraction = 0.5
    """w of (1 − w) · divergence + w · (−log p)."""


class Referenced(Section):
    """A loss of the log-ratio to the model the run starts from."""

    beta: Positive = 0.1
    """Strength of the pull to the reference: rewards are beta · (log π − log π_ref)."""


class DPO(Referenced):
    """Direct preference optimisation (arXiv:2305.18290)."""

    kind: Literal["dpo"]
    label_smoothing: Smoothing = 0.0
    """Share of pairs taken to be labelled the wrong way round: conservative DPO."""
    losses: dict[Mixable, Positive] = Field(default={"dpo": 1.0}, min_length=1)
    """Weights of several losses of one `beta`, added up: MPO (arXiv:2411.10442) is {dpo: 0.8, bco: 0.2, sft: 1.0}."""

    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """From the reference, as in f-DPO (arXiv:2309.16240); all but reverse_kl need the loss dpo alone, or with sft."""
    divergence_alpha: float = 0.5
    """Of the alpha divergence; 0 is forward, 1 reverse KL."""

    @model_validator(mode="after")
    def _divergence_is_read(self) -> DPO:
        others = sorted(set(self.losses) - {"dpo", "sft"})
        if self.divergence != "reverse_kl" and others:
            raise ValueError(
                f"divergence={self.divergence} is only read by the loss dpo, not by {', '.join(others)}: take these "
                "out of losses, or set it to reverse_kl"
            )
        return self

    @model_validator(mode="after")
    def _smoothing_is_read(self) -> DPO:
        if self.label_smoothing and "dpo" not in self.losses:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} is only read by the loss dpo, which losses={self.losses} "
                "leaves out: set it to 0"
            )
        return self


class RobustDPO(Referenced):
    """DPO that is unbiased under labels flipped at a known rate (arXiv:2403.00409)."""

    kind: Literal["robust_dpo"]
    label_smoothing: Smoothing = 0.1
    """The rate."""


class Hinge(Referenced):
    """Hinge on the margin (RSO, arXiv:2309.06657; SLiC)."""

    kind: Literal["hinge"]


class IPO(Referenced):
    """Identity preference optimisation (arXiv:2310.12036)."""

    kind: Literal["ipo"]
    length_normalise: bool = True
    """Divide each log-ratio by its answer's tokens, as TRL does; false is the paper's formula."""


class EXO(Referenced):
    """Exact optimisation for pairs (arXiv:2402.00856)."""

    kind: Literal["exo"]
    label_smoothing: float = Field(default=1e-3, gt=0.0, lt=0.5)


class NCA(Referenced):
    """Noise-contrastive alignment for pairs (arXiv:2402.05369)."""

    kind: Literal["nca"]


class BCO(Referenced):
    """Binary classifier optimisation for pairs (arXiv:2404.04656); its shift is the running mean of all rewards."""

    kind: Literal["bco"]


class SPPO(Referenced):
    """Self-play preference optimisation with hard labels (arXiv:2405.00675)."""

    kind: Literal["sppo"]


class APOZero(Referenced):
    """Anchored preference optimisation (arXiv:2408.06266) for chosen answers better than the model's own."""

    kind: Literal["apo_zero"]


class APODown(Referenced):
    """Anchored preference optimisation (arXiv:2408.06266) for chosen answers worse than the model's own."""

    kind: Literal["apo_down"]


class DiscoPOP(Referenced):
    """The loss that a search over programs found (arXiv:2406.08414): logistic and exponential, blended."""

    kind: Literal["discopop"]
    tau: Positive = 0.05
    """How fast the blend changes over with the margin."""


class KTO(Referenced):
    """Kahneman–Tversky optimisation (arXiv:2402.01306) of single answers labelled good or bad."""

    kind: Literal["kto"]
    desirable_weight: NonNegative = 1.0
    undesirable_weight: NonNegative = 1.0


class ORPO(Section):
    """Odds-ratio preference optimisation (arXiv:2403.07691); needs no reference."""

    kind: Literal["orpo"]
    weight: NonNegative = 0.1
    """Of the odds-ratio term beside the NLL of the chosen answer: the paper's λ, TRL's beta."""


class SimPO(Section):
    """Simple preference optimisation (arXiv:2405.14734) on mean log-probs; needs no reference."""

    kind: Literal["simpo"]
    beta: Positive = 2.0
    gamma: NonNegative = 1.0
    """The margin itself; papers often quote gamma / beta."""


class CPO(Section):
    """Contrastive preference optimisation (arXiv:2401.08417); needs no reference."""

    kind: Literal["cpo"]
    beta: Positive = 0.1
    alpha: NonNegative = 1.0
    """Of the NLL of the chosen answer."""


class RewardModel(Section):
    """A Bradley–Terry reward model: the decoder with a scalar head on the answer's last token."""

    kind: Literal["reward_model"]
    centring: NonNegative = 0.0
    """Of (chosen + rejected)², which keeps scores around 0 (arXiv:2312.09244)."""


Algorithm = (
    SFT
    | SFTDistillation
    | DPO | RobustDPO | Hinge | IPO | EXO | NCA | BCO | SPPO | APOZero | APODown | DiscoPOP | KTO | ORPO | SimPO
    | CPO | RewardModel
)  # fmt: skip


class OfflineData(Section):
    path: str
    """JSON lines, UTF-8. sft, sft_distillation: {messages}, or {prompt, completion};
    kto: {prompt, completion, label: true or false};
    other kinds: {prompt, chosen, rejected}, for reward_model with `margin` if you like. A prompt is text or a list of
    messages."""
    held_out_path: str | None = None
    """Rows for evaluation, in the same form."""
    held_out_fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Instead of `held_out_path`: keep this share of the prompts of `path`, drawn by `seed`, for evaluation alone."""
    examples_per_step: PositiveInt = 8
    """Conversations, labelled answers or pairs in one optimizer update."""
    max_tokens: PositiveInt = 512
    """Prompt and answer together; what is longer is cut at its end, and dropped where no answer token is left."""
    shuffle: bool = True
    chat: bool = True
    """Render with the tokenizer's chat template; false feeds prompt and answer as they are, then the end token."""
    system_prompt: str | None = None
    on_bad_row: Literal["error", "skip"] = "error"

    @model_validator(mode="after")
    def _system_prompt_needs_chat(self) -> OfflineData:
        if self.system_prompt is not None and not self.chat:
            raise ValueError("system_prompt needs a chat template: set data.chat=true, or put it into the prompts")
        return self

    @model_validator(mode="after")
    def _one_held_out(self) -> OfflineData:
        if self.held_out_path is not None and self.held_out_fraction > 0:
            raise ValueError(
                f"held_out_path={self.held_out_path!r} and held_out_fraction={self.held_out_fraction} both say what is "
                "held out: give one of them"
            )
        return self

    @property
    def holds_out(self) -> bool:
        return self.held_out_path is not None or self.held_out_fraction > 0


class OfflineTraining(Section):
    tokens_per_microbatch: PositiveInt = 4096
    """Token positions a device holds in one forward and backward pass, those along `mesh.sequence` together; gradients
    add up over micro-batches."""
    row_length: PositiveInt | None = None
    """Token positions of a packed row; null is the longest example of the data, a pair's prompt counted once."""
    logprob_chunk: PositiveInt = 256
    """Target tokens per row whose logits exist at the same time."""
    sequence_attention: Literal["auto", "ring", "ulysses"] = "auto"
    """How attention reaches beyond a device where `mesh.sequence` cuts rows along time: `ring`, keys and values go
    around (row lengths are multiples of 2 · `mesh.sequence`), or `ulysses`, heads are exchanged for columns (key/value
    heads are multiples of `mesh.sequence` · `mesh.tensor`); `auto` is the ring."""
    max_skipped_updates: PositiveInt | None = 5
    """Updates in a row without a finite loss and gradient, each of which is skipped, until the run keeps the last in
    RUN_DIR/faults and ends. Null: never."""
    cache_reference: bool = False
    """Score all examples by the reference before the first step, keep the scores in the run folder, and hold no second
    copy of the weights."""


class OfflineEvaluation(Section):
    every: Count = 0
    """Steps between evaluations on the held-out examples; 0 evaluates before the first and after the last step."""
    enabled: bool = True
    max_examples: PositiveInt = 256
    """The first ones of those held out."""


class OfflineConfig(Section):
    """One run on data that is there already."""

    run_dir: str = "runs/run"
    """Where checkpoints and metrics go."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    steps: PositiveInt = 100
    """Optimizer updates."""
    model: Model
    mesh: Mesh = Mesh()
    data: OfflineData
    algorithm: Annotated[Algorithm, Field(discriminator="kind")]
    """What is learned from the rows of `data.path`; online methods take their prompts from `data.task` instead."""
    optimizer: Optimizer = Optimizer()
    training: OfflineTraining = OfflineTraining()
    checkpoint: Checkpoint = Checkpoint()
    watchdog_minutes: Positive | None = 60.0
    """Longest that the start or a phase of a step may last: the process then tells what it waits for and ends. Null:
    no limit."""
    evaluation: OfflineEvaluation = OfflineEvaluation()
    debug: OfflineDebug = OfflineDebug()

    @model_validator(mode="after")
    def _experts_consistent(self) -> OfflineConfig:
        moe = self.model.moe
        if moe.adds_loss or moe.routing_replay:
            raise ValueError(
                f"algorithm.kind={self.algorithm.kind} has no loss for routers and no sampler to replay: set "
                "model.moe.aux_loss_coef=0, model.moe.z_loss_coef=0 and model.moe.routing_replay=false"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> OfflineConfig:
        self.debug.check_clock(self.checkpoint)
        if self.evaluation.every and not self.data.holds_out:
            raise ValueError(
                f"evaluation.every={self.evaluation.every} finds nothing held out: give data.held_out_path or "
                "data.held_out_fraction, or leave evaluation.every at 0"
            )
        if self.algorithm.kind == "kto" and self.data.examples_per_step < 2:
            raise ValueError(
                "data.examples_per_step=1: algorithm.kind=kto measures its reference point on prompts with each "
                "other's answers, so it needs at least 2"
            )
        if self.training.cache_reference and not (
            isinstance(self.algorithm, Referenced) and self.algorithm.kind != "kto"
        ):
            reason = (
                "pairs prompts with answers of other examples" if self.algorithm.kind == "kto" else "has no reference"
            )
            raise ValueError(
                f"training.cache_reference=true: algorithm.kind={self.algorithm.kind} {reason}, so there is nothing to "
                "score beforehand: leave it false"
            )
        row = self.training.row_length
        if row is not None and row > self.training.tokens_per_microbatch:
            raise ValueError(
                f"training.tokens_per_microbatch={self.training.tokens_per_microbatch} does not hold one row of "
                f"training.row_length={row}: raise the first or lower the second"
            )
        return self


def _kinds(schema: type[Section]) -> list[str]:
    """The values `algorithm.kind` may have."""
    sections = get_args(schema.model_fields["algorithm"].annotation)
    return [get_args(section.model_fields["kind"].annotation)[0] for section in sections]


ONLINE_KINDS, OFFLINE_KINDS = _kinds(Config), _kinds(OfflineConfig)


def config_class(tree: Any) -> type[Config] | type[OfflineConfig]:
    """Which of the two schemas a recipe is written in: the one that has its `algorithm.kind`.

    Where `data.path` is given, which only offline recipes have, no kind or an unknown one is taken for an offline one.
    """
    sections = tree if isinstance(tree, Mapping) else {}
    algorithm, data = (sections.get(name) or {} for name in ("algorithm", "data"))
    kind = algorithm.get("kind") if isinstance(algorithm, Mapping) else None
    reads_rows = isinstance(data, Mapping) and "path" in data
    return OfflineConfig if kind in OFFLINE_KINDS or (reads_rows and kind not in ONLINE_KINDS) else Config


def defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of the schema of `tree` that has a default, JSON-like; of the kind the tree names."""
    if config_class(tree) is Config:
        return Config(model=Model(path="")).model_dump(mode="json", exclude={"model"})
    kind = tree["algorithm"]["kind"]
    sample = {
        "model": {"path": ""},
        "data": {"path": ""},
        "algorithm": {"kind": kind if kind in OFFLINE_KINDS else "sft"},
    }
    return OfflineConfig.model_validate(sample).model_dump(mode="json", exclude={"model": True, "data": {"path"}})
