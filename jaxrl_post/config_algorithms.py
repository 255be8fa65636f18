"""The critic-free policy methods a recipe may name: `algorithm.kind` and the options that kind has.

A method is three choices: credit (how rewards become advantages, `loops.credit`), surrogate (the loss of a token,
`training.surrogate`) and reduction (`aggregation`). A kind is a preset of the three with the usual values of its paper
or of the systems that ship it. Kinds named after an estimator use PPO's clip; kinds named after a surrogate take any
estimator that looks at nothing but rewards, groups and lengths, by its name (`advantage`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from jaxrl_post.config_base import Aggregation, Fraction, FunctionPath, NonNegative, Positive, Section, default_kind
from jaxrl_post.config_teachers import Taught, TaughtAdvantage

Estimator = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "pass_at_k", "maxrl", "gpg", "lite_ppo", "gdpo"
]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]


class KL(Section):
    """A pull towards the model the run started from."""

    coef: NonNegative = 0.0
    """0 keeps no reference model."""
    estimator: KLEstimator = "k3"
    """Of each token's KL; a `+` keeps the value and takes k2's gradient, the wanted one (in the loss only)."""
    where: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken from the reward: coef · KL of each token, by π_old, before advantages."""
    importance_corrected: bool = False
    """Times π_θ/π_old, gradient through both (in the loss only); right off policy, for k1 and k3 on policy too."""
    target: Positive | None = None
    """In the reward only: adapt coef so that the mean KL of a token comes here; null keeps coef fixed."""
    horizon: PositiveInt = 10_000
    """Samples over which the adaptation acts."""

    @model_validator(mode="after")
    def _belongs(self) -> KL:
        if self.where == "reward" and (self.estimator.endswith("+") or self.importance_corrected):
            raise ValueError(
                f"algorithm.kl.estimator={self.estimator}, algorithm.kl.importance_corrected="
                f"{str(self.importance_corrected).lower()} choose a gradient, and a KL in the reward has none: use an "
                "estimator without + and importance_corrected=false, or algorithm.kl.where=loss"
            )
        if self.target is not None and (self.where == "loss" or self.coef == 0):
            raise ValueError(
                f"algorithm.kl.target={self.target} adapts a coefficient above 0 of a KL in the reward: set "
                "algorithm.kl.where=reward and algorithm.kl.coef, the value to start from"
            )
        return self


class RewardKL(KL):
    """The KL where a method's paper has it: in the reward, by k1."""

    estimator: KLEstimator = "k1"
    where: Literal["loss", "reward"] = "reward"


class Overlong(Section):
    """DAPO's soft punishment of length (arXiv:2503.14476), added to the reward."""

    buffer: PositiveInt | None = None
    """Tokens before rollout.max_new_tokens where it begins; null is a fifth of them (the paper's 4096 of 20480)."""
    factor: NonNegative = 1.0
    """Taken from the reward at the limit."""


class FilterGroups(Section):
    """DAPO's dynamic sampling: groups whose rewards are all equal are dropped and the step filled with others."""

    max_attempts: PositiveInt = 10
    """Batches of prompts sampled beyond the first; then the step goes on with the groups there are."""


class TokenTIS(Section):
    """Truncated importance sampling per token: weight clip(w, low, high)."""

    kind: Literal["token_tis"]
    low: NonNegative = 0.0
    high: Positive = 2.0
    batch_normalize: bool = False
    """Divide the weights by their mean over the tokens of the update; needs old_logprobs=trainer."""


class SequenceTIS(Section):
    """Truncated importance sampling per sequence: weight clip(Π w, low, high)."""

    kind: Literal["sequence_tis"]
    low: NonNegative = 0.0
    high: Positive = 5.0
    batch_normalize: bool = False
    """Divide the weights by their mean over the sequences of the update; needs old_logprobs=trainer."""


class IcePop(Section):
    """Weight w for tokens with w in [low, high] (arXiv:2510.18855); others are dropped."""

    kind: Literal["icepop"]
    low: NonNegative = 0.5
    high: Positive = 5.0


class SequenceMaskTIS(Section):
    """Weight w; sequences whose geometric mean of w leaves [low, high] are dropped."""

    kind: Literal["sequence_mask_tis"]
    low: NonNegative = 0.5
    high: Positive = 5.0


class Geometric(Section):
    """Weight 1; sequences whose geometric mean of w leaves [low, high] are dropped."""

    kind: Literal["geometric"]
    low: NonNegative = 0.999
    high: Positive = 1.001


class KLRejection(Section):
    """Weight 1; tokens or sequences whose KL estimate exceeds `upper` are dropped."""

    kind: Literal["kl_rejection"]
    estimator: Literal["k1", "k2", "k3"] = "k1"
    level: Literal["token", "seq_sum", "seq_mean", "seq_max"] = "token"
    upper: Positive
    """The largest estimate that stays; k1 by its size."""


Correction = Annotated[
    TokenTIS | SequenceTIS | IcePop | SequenceMaskTIS | Geometric | KLRejection, Field(discriminator="kind")
]
REJECTIONS = (Geometric, KLRejection)  # weight 1: they drop and do not weigh


class PolicyMethod(Section):
    """Options of every critic-free method."""

    weighs_by_ratio: ClassVar[bool] = True
    """Whether the surrogate itself has π_θ/π_old."""
    learns_from_zero_advantage: ClassVar[bool] = False
    compares_samples: ClassVar[bool] = True
    """Whether a sample without others of its prompt has advantage 0."""

    kind: str
    aggregation: Aggregation = "token-mean"
    loss_scale_length: PositiveInt | None = None
    """The constant L of seq-mean-token-sum-norm; null is `rollout.max_new_tokens`."""
    epochs: PositiveInt = 1
    """Passes over a step's samples."""
    mini_batches: PositiveInt = 1
    """Optimizer updates in each pass; samples are split by whole groups."""
    old_logprobs: Literal["sampler", "trainer"] = "sampler"
    """π_old from the sampler's own log-probs, or recomputed by a forward pass before the first update."""
    drop_truncated: bool = False
    """Leave samples that ran into the token limit out of the loss, numerator and denominator."""
    overlong: Overlong | None = None
    """Length punishment in the reward; null has none."""
    filter_groups: FilterGroups | None = None
    """Drop groups without signal and sample others; null trains on what comes."""
    kl: KL = KL()
    entropy_coef: NonNegative = 0.0
    """−coef · entropy of each token in the loss."""
    correction: Correction | None = None
    """For the gap between sampler and trainer, on w = π_trainer/π_sampler; what it drops stays in the denominator.

    π_trainer is π_old with old_logprobs=trainer and the policy of each update with old_logprobs=sampler.
    """
    off_policy_mask: NonNegative | None = None
    """Drop sequences with A < 0 whose mean of log π_old − log π_θ exceeds this (arXiv:2512.02556 uses 1e-4)."""
    distillation: TaughtAdvantage | None = None
    """Take coef · (log π_old − log π_teacher) of each token from its advantage; null has no teacher."""

    @model_validator(mode="after")
    def _policy_options(self) -> PolicyMethod:
        if self.loss_scale_length and self.aggregation != "seq-mean-token-sum-norm":
            raise ValueError(
                f"algorithm.loss_scale_length={self.loss_scale_length} is only read by "
                f"algorithm.aggregation=seq-mean-token-sum-norm, not by {self.aggregation}: set it to null"
            )
        weighs = self.correction is not None and not isinstance(self.correction, REJECTIONS)
        if weighs and self.weighs_by_ratio and self.old_logprobs == "sampler":
            raise ValueError(
                f"algorithm.correction.kind={self.correction and self.correction.kind} with algorithm.old_logprobs="
                f"sampler weighs by π_θ/π_sampler, which the loss of kind {self.kind} already has as its ratio: set "
                "algorithm.old_logprobs=trainer, or a correction that only drops (geometric, kl_rejection)"
            )
        if self.normalizes_weights and self.old_logprobs == "sampler":
            raise ValueError(
                "algorithm.correction.batch_normalize=true needs the weights of the whole update before it begins, and "
                "algorithm.old_logprobs=sampler weighs by the policy as it moves: set algorithm.old_logprobs=trainer"
            )
        if self.distillation and not self.distillation.reward_weight and self.filter_groups:
            raise ValueError(
                "algorithm.distillation.reward_weight=0 learns from groups whose rewards are all equal, and "
                "algorithm.filter_groups drops them: set algorithm.filter_groups to null"
            )
        return self

    @property
    def taught(self) -> Taught | None:
        """Who the policy is distilled from."""
        return self.distillation

    @model_validator(mode="after")
    def _heads_are_the_whole_reward(self) -> PolicyMethod:
        shaped = {"algorithm.overlong": self.overlong is not None, "algorithm.kl.where=reward": self.kl_in_reward}
        for key, given in shaped.items():
            if given and self.compares_heads:
                raise ValueError(
                    f"{key} changes the sum of the rewards, and {self.compared} compares its parts: write a punishment "
                    "of length as a part of its own, and set algorithm.kl.where=loss"
                )
        return self

    @property
    def learns_alone(self) -> bool:
        """Whether a sample teaches something where it is the only one of its prompt."""
        return not self.compares_samples or self.learns_from_zero_advantage or self.taught is not None

    @property
    def normalizes_weights(self) -> bool:
        return isinstance(self.correction, TokenTIS | SequenceTIS) and self.correction.batch_normalize

    @property
    def kl_in_loss(self) -> bool:
        return self.kl.coef > 0 and self.kl.where == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.kl.coef > 0 and self.kl.where == "reward"

    @property
    def compares_heads(self) -> bool:
        """Whether the advantage looks at each part of a weighted reward, and not at their sum."""
        return False

    @property
    def compared(self) -> str:
        """The key that says how rewards become advantages, and its value."""
        return f"algorithm.kind={self.kind}"

    @property
    def keeps_zero_advantage(self) -> bool:
        """Whether a sample without advantage has a gradient, or counts in what the others are weighed by."""
        regularized = self.kl_in_loss or self.entropy_coef > 0
        return self.learns_from_zero_advantage or regularized or self.normalizes_weights


class Clipped(PolicyMethod):
    """PPO's clip (arXiv:1707.06347)."""

    clip_low: Fraction = 0.2
    """How far the ratio may fall below 1; 1 leaves that side open."""
    clip_high: NonNegative = 0.2
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound the loss of tokens with A < 0 by −A · this (3 is usual); null does not."""


class GRPO(Clipped):
    """Group-relative policy optimisation (arXiv:2402.03300) with PPO clipping."""

    kind: Literal["grpo"] = "grpo"
    normalize_by_std: bool = True
    """Divide by the group's standard deviation (ddof 1) + 1e-6; false is Dr.GRPO's centring alone."""


class DrGRPO(Clipped):
    """Dr.GRPO (arXiv:2503.20783): R − mean of the group, token losses summed over a constant length."""

    kind: Literal["dr_grpo"]
    aggregation: Aggregation = "seq-mean-token-sum-norm"


class RLOO(Clipped):
    """RLOO (arXiv:2402.14740): R − mean of the group's others."""

    kind: Literal["rloo"]


class ReinforcePlusPlus(Clipped):
    """REINFORCE++ (arXiv:2501.03262): return to go of −coef · KL and the final reward, whitened over the tokens."""

    compares_samples: ClassVar[bool] = False
    kind: Literal["reinforce_plus_plus"]
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of the return for each token to go."""
    kl: RewardKL = RewardKL()


class ReinforcePlusPlusBaseline(Clipped):
    """REINFORCE++-baseline (arXiv:2501.03262): R − mean of the group, whitened over the batch's tokens."""

    kind: Literal["reinforce_plus_plus_baseline"]


class ReMax(Clipped):
    """ReMax (arXiv:2310.10505): R − reward of the greedy answer of the same policy to the same prompt."""

    compares_samples: ClassVar[bool] = False
    kind: Literal["remax"]


class OPO(Clipped):
    """OPO (arXiv:2505.23585): R − length-weighted mean of the group."""

    kind: Literal["opo"]


class PassAtK(Clipped):
    """Pass@k training (arXiv:2503.19595): only the group's best sample learns, from its lead over the second."""

    kind: Literal["pass_at_k"]


class MaxRL(Clipped):
    """MaxRL (arXiv:2602.02710): (R − mean) / mean of the group, for rewards of 0 or more."""

    kind: Literal["maxrl"]


class LitePPO(Clipped):
    """LitePPO (arXiv:2508.08221): (R − mean of the group) / std of the batch."""

    kind: Literal["lite_ppo"]


class GDPO(Clipped):
    """GDPO (arXiv:2601.05242): each part of a weighted reward normalised in its group, weighted sum, whitened."""

    kind: Literal["gdpo"]

    @property
    def compares_heads(self) -> bool:
        return True


class DAPO(Clipped):
    """DAPO (arXiv:2503.14476): clip-higher, token mean, overlong punishment, dynamic sampling, no KL."""

    kind: Literal["dapo"]
    clip_high: NonNegative = 0.28
    overlong: Overlong | None = Overlong()
    filter_groups: FilterGroups | None = FilterGroups()


class Surrogate(PolicyMethod):
    """Methods that change the loss of a token and leave the advantage free."""

    advantage: Estimator = "grpo"
    """The kind whose advantage to use."""

    @property
    def compares_heads(self) -> bool:
        return self.advantage == "gdpo"

    @property
    def compared(self) -> str:
        return f"algorithm.advantage={self.advantage}"


class GSPO(Surrogate):
    """GSPO (arXiv:2507.18071): PPO clip on the geometric mean ratio of the sequence."""

    kind: Literal["gspo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    clip_low: Fraction = 3e-4
    clip_high: NonNegative = 4e-4
    level: Literal["token", "sequence"] = "token"
    """Whose log-prob carries the gradient: each token's own, or all of the sequence's; alike while A and weight are."""


class CISPO(Surrogate):
    """CISPO (arXiv:2506.13585): −clip(ratio) · A · log π, every token keeps a gradient."""

    kind: Literal["cispo"]
    clip_low: NonNegative = 1.0
    """1 or more leaves the lower side open."""
    clip_high: NonNegative = 4.0


class SAPO(Surrogate):
    """SAPO (arXiv:2511.20347): a soft gate in place of the clip."""

    kind: Literal["sapo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05


class TotalVariation(Section):
    """How far a token's probability may move down and up."""

    kind: Literal["tv"] = "tv"
    low: NonNegative = 0.2
    high: NonNegative = 0.2


class BinaryKL(Section):
    """How far (p, 1 − p) of a token may move, as a KL."""

    kind: Literal["kl"]
    limit: NonNegative = 0.05


class DPPO(Surrogate):
    """DPPO (arXiv:2602.04879): −min(ratio, max_ratio) · A · log π inside a trust region of the token's probability."""

    kind: Literal["dppo"]
    region: Annotated[TotalVariation | BinaryKL, Field(discriminator="kind"), default_kind("tv")] = TotalVariation()
    max_ratio: Positive = 20.0


class GMPO(Surrogate):
    """GMPO (arXiv:2507.20673): geometric mean of the sequence's ratios, each bounded in log space."""

    kind: Literal["gmpo"]
    aggregation: Aggregation = "seq-mean-token-mean"
    clip_low: NonNegative = 0.4
    clip_high: NonNegative = 0.4


class TOPR(Surrogate):
    """TOPR (arXiv:2503.14286): plain weight where A ≥ 0, ratio truncated to [0, 1] where A < 0."""

    kind: Literal["topr"]
    aggregation: Aggregation = "seq-mean-token-sum"
    level: Literal["token", "sequence"] = "sequence"
    """Whose ratio."""


class PolicyGradient(Surrogate):
    """REINFORCE: −A · log π, for samples of the policy itself; `correction` may weigh those of another."""

    weighs_by_ratio: ClassVar[bool] = False
    kind: Literal["policy_gradient"]


class GPG(PolicyMethod):
    """GPG (arXiv:2504.02546): −A · log π, A = (R − mean) · samples / samples of groups with signal."""

    weighs_by_ratio: ClassVar[bool] = False
    kind: Literal["gpg"]
    scale: Positive = 1.0
    """Divides the advantage."""


class Custom(Surrogate):
    """A loss of the user's own, as described in `training.surrogate`."""

    weighs_by_ratio: ClassVar[bool] = False
    learns_from_zero_advantage: ClassVar[bool] = True
    kind: Literal["custom"]
    function: FunctionPath
    """`module:function` (logp, old_logp, advantage, mask, **options) -> loss of each token."""
    options: dict[str, bool | int | float | str] = Field(default={})
    """Keywords it is called with."""

    @model_validator(mode="after")
    def _weights_stay_apart(self) -> Custom:
        if self.normalizes_weights:
            raise ValueError(
                "algorithm.correction.batch_normalize=true is applied through the advantage, in which kind custom need "
                "not be linear: set it to false"
            )
        return self


PolicyAlgorithm = (
    GRPO
    | DrGRPO
    | RLOO
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | ReMax
    | OPO
    | PassAtK
    | MaxRL
    | LitePPO
    | GPG
    | GDPO
    | DAPO
    | GSPO
    | CISPO
    | SAPO
    | DPPO
    | GMPO
    | TOPR
    | PolicyGradient
    | Custom
)
