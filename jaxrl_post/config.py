"""The typed schema of everything a recipe may say. Importing it costs no accelerator stack.

Models are frozen: a config is made once, from a file and overrides (`jaxrl_post.recipes`), and never changed.
Unknown keys are refused. Every field has its documentation here; `configs/schema.json` is generated from it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from jaxrl_post.config_alerts import Alerts
from jaxrl_post.config_algorithms import GPG, GRPO, PolicyAlgorithm, PolicyGradient, PolicyMethod
from jaxrl_post.config_base import Count, Positive, Section, default_kind
from jaxrl_post.config_checkpoint import Checkpoint as Checkpoint
from jaxrl_post.config_debug import Debug
from jaxrl_post.config_distillation import Distillation
from jaxrl_post.config_model import Model as Model
from jaxrl_post.config_model import RandomModel as RandomModel
from jaxrl_post.config_optimizer import Optimizer
from jaxrl_post.config_ppo import PPO
from jaxrl_post.config_rewards import ForeignCode, LastNumberReward, Reward, single_rewards
from jaxrl_post.config_sampling import SamplingKeys

AxisSize = Annotated[int, Field(ge=-1)]


class Mesh(Section):
    """Sizes of the five mesh axes; -1 in at most one of them takes the devices that remain."""

    data: AxisSize = 1
    fsdp: AxisSize = -1
    expert: AxisSize = 1
    sequence: AxisSize = 1
    tensor: AxisSize = 1
    allow_unused_devices: bool = False
    """Accept a mesh smaller than the number of devices."""
    zero: Literal[1, 2, 3] = 3
    """What `fsdp` cuts: 3 weights, gradients and optimizer; 2 gradients and optimizer, where weights fit whole: they
    are gathered once an update and not at each layer, and rollouts read them as they lie; 1 the optimizer alone."""

    @model_validator(mode="after")
    def _sizes(self) -> Mesh:
        sizes = {k: getattr(self, k) for k in ("data", "fsdp", "expert", "sequence", "tensor")}
        zero = [k for k, v in sizes.items() if v == 0]
        rest = [k for k, v in sizes.items() if v == -1]
        if zero:
            raise ValueError(f"mesh.{zero[0]}=0: an axis size is a positive number, or -1 for the remaining devices")
        if len(rest) > 1:
            raise ValueError(
                f"mesh axes {' and '.join(rest)} are both -1: only one axis can take the remaining devices"
            )
        return self


class ArithmeticTask(Section):
    """`What is a + b?` over every pair of operands; a fixed, deterministic fifth of the pairs is held out."""

    kind: Literal["arithmetic"] = "arithmetic"
    operation: Literal["add", "subtract", "multiply"] = "add"
    low: int = 1
    high: int = 9
    template: str = "What is {a} {op} {b}? Answer with just the number."

    @model_validator(mode="after")
    def _range(self) -> ArithmeticTask:
        if self.high < self.low:
            raise ValueError(f"high={self.high} is below low={self.low}: no operands to draw from")
        return self

    @model_validator(mode="after")
    def _placeholders(self) -> ArithmeticTask:
        try:
            text = self.template.format(a="<a>", b="<b>", op="<op>")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"template {self.template!r} cannot be filled in ({error}): it may use {{a}}, {{b}} and {{op}}; "
                "write {{ and }} for braces"
            ) from None
        if "<a>" not in text or "<b>" not in text:
            raise ValueError(f"template {self.template!r} must contain both operands, {{a}} and {{b}}")
        return self


class JsonlTask(Section):
    """Prompts from a JSON-lines file: each row has a `prompt` (text) or `messages` (chat) and any answer fields."""

    kind: Literal["jsonl"]
    path: str
    """One JSON object a line, UTF-8."""
    held_out_path: str | None = None
    """Rows for evaluation, in the same form."""
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    on_bad_row: Literal["error", "skip"] = "error"


class ReasoningGymTask(Section):
    """Procedural tasks of the package reasoning-gym (extra `[tasks]`)."""

    kind: Literal["reasoning_gym"]
    dataset: str
    size: PositiveInt = 1000
    held_out: PositiveInt = 64
    options: dict[str, int | float | str | bool] = Field(default={})


Task = Annotated[ArithmeticTask | JsonlTask | ReasoningGymTask, Field(discriminator="kind"), default_kind("arithmetic")]


class CurriculumOptions(Section):
    """Prompts whose samples were rewarded alike, which teaches a comparison nothing, are passed over for a while."""

    chance: float = Field(default=0.5, gt=0.0, lt=1.0)
    """That such a prompt is drawn when its turn comes; after n such groups in a row its n-th power, at least 1/64."""


class Data(Section):
    task: Task = ArithmeticTask()
    prompts_per_step: PositiveInt = 8
    max_prompt_tokens: PositiveInt = 64
    """Longer prompts are dropped at start and counted; none left is an error."""
    shuffle: bool = True
    chat: bool = True
    """Wrap a text prompt as one user turn of the tokenizer's chat template; false feeds the text as it is."""
    system_prompt: str | None = None
    curriculum: CurriculumOptions | None = None
    """Let prompts rest that have taught nothing when last sampled; null draws all alike."""


class PartialRollout(Section):
    """A rollout that stops before its longest samples have finished; these go on in the next step's rollout, under its
    weights. A group is trained on when all of its samples have finished; until then it takes the place of a new prompt,
    so that `data.prompts_per_step` groups are always under way."""

    finish_fraction: float = Field(default=0.8, gt=0.0, le=1.0)
    """Stop when this share of what a rollout samples has finished on each data replica, and a whole group there."""
    of: Literal["samples", "groups"] = "samples"
    """What the share is of: samples, or groups with all of their samples, which stops later and trains on more."""
    max_age: PositiveInt = 3
    """Policy versions a sample may span beyond its first: one begun so many steps ago is finished before the stop."""


class Rollout(SamplingKeys):
    samples_per_prompt: PositiveInt = 8
    slots: PositiveInt | None = None
    """Sequences decoded at once on each data replica; null is all of a step's samples, or as many as fit its memory."""
    refill: PositiveInt | None = None
    """Free slots awaited before a refill; a multiple or a divisor of `samples_per_prompt`; null chooses."""
    prefill_columns: PositiveInt = 512
    """Tokens of a prompt that one prefill runs through the model; a longer prompt takes several."""
    lockstep: bool = False
    """All data replicas run the same number of decode steps, for backends where each cannot go at its own pace."""
    attention: Literal["auto", "xla", "triton"] = "auto"
    """Of a decode step: XLA's products, or a kernel for NVIDIA GPUs that reads each sequence's own columns of the
    cache, which XLA would copy at every step; `auto`: the kernel on GPUs. On a CPU `triton` is interpreted, slowly."""
    partial: PartialRollout | None = None
    """Let a rollout stop early and its unfinished samples go on in the next step; null samples all of them in full."""


Algorithm = Annotated[PolicyAlgorithm | PPO | Distillation, Field(discriminator="kind"), default_kind("grpo")]


class Training(Section):
    tokens_per_microbatch: PositiveInt = 4096
    """Token positions a device holds in one forward and backward pass, those along `mesh.sequence` together; gradients
    add up over micro-batches."""
    row_length: PositiveInt | None = None
    """Token positions of a packed row; null is the shortest that holds a whole group, or one sample of it."""
    share_prefix: bool = True
    """Keep a group's prompt once in a row and let each response see it and itself."""
    logprob_chunk: PositiveInt = 256
    """Target tokens per row whose logits exist at the same time."""
    sequence_attention: Literal["auto", "ring", "ulysses"] = "auto"
    """How attention reaches beyond a device where `mesh.sequence` cuts rows along time: `ring`, keys and values go
    around (row lengths are multiples of 2 · `mesh.sequence`), or `ulysses`, heads are exchanged for columns (key/value
    heads are multiples of `mesh.sequence` · `mesh.tensor`); `auto` is the ring."""
    max_skipped_updates: PositiveInt | None = 5
    """Updates in a row without a finite loss and gradient, of the policy or of its critic, each of which is skipped,
    until the run keeps the last in RUN_DIR/faults and ends. Null: never."""


class Evaluation(Section):
    every: Count = 0
    """Steps between greedy evaluations on held-out prompts; 0 evaluates before the first and after the last step."""
    enabled: bool = True
    max_prompts: PositiveInt = 64


class Config(Section):
    """One run."""

    run_dir: str = "runs/run"
    """Where checkpoints, metrics and rollouts go."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    steps: PositiveInt = 100
    model: Model
    mesh: Mesh = Mesh()
    data: Data = Data()
    reward: Reward = LastNumberReward()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = GRPO()
    optimizer: Optimizer = Optimizer()
    training: Training = Training()
    checkpoint: Checkpoint = Checkpoint()
    watchdog_minutes: Positive | None = 60.0
    """Longest that the start or a phase of a step may last: the process then tells what it waits for and ends. Null:
    no limit."""
    evaluation: Evaluation = Evaluation()
    alerts: Alerts = Alerts()
    debug: Debug = Debug()
    dump_rollouts: bool = True
    """Write every step's samples to rollouts/*.jsonl."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        group, refill, slots = self.rollout.samples_per_prompt, self.rollout.refill, self.rollout.slots
        if refill is not None and refill % group and group % refill:
            raise ValueError(
                f"rollout.refill={refill} must be a multiple or a divisor of rollout.samples_per_prompt={group}"
            )
        if refill is not None and slots is not None and refill > slots:
            raise ValueError(f"rollout.refill={refill} cannot exceed rollout.slots={slots}")
        self._check_rewards()
        if self.data.curriculum and (group == 1 or self.algorithm.kind == "distillation"):
            key = f"rollout.samples_per_prompt={group}" if group == 1 else "algorithm.kind=distillation"
            raise ValueError(
                f"data.curriculum lets prompts rest whose samples were rewarded alike, and {key} compares none: set "
                "data.curriculum=null"
            )
        self.debug.check_clock(self.checkpoint)
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        if self.training.row_length is not None and self.training.row_length < longest:
            raise ValueError(
                f"training.row_length={self.training.row_length} is shorter than data.max_prompt_tokens + "
                f"rollout.max_new_tokens = {longest}"
            )
        row = self.training.row_length or longest
        if self.training.tokens_per_microbatch < row:
            raise ValueError(
                f"training.tokens_per_microbatch={self.training.tokens_per_microbatch} does not hold one row: give at "
                f"least {row} (training.row_length, or data.max_prompt_tokens + rollout.max_new_tokens)"
            )
        return self

    def _check_rewards(self) -> None:
        for section, reward in single_rewards(self.reward).items():
            if reward.kind == "reasoning_gym" and self.data.task.kind != "reasoning_gym":
                raise ValueError(
                    f"{section}.kind=reasoning_gym scores rows of data.task.kind=reasoning_gym, not "
                    f"{self.data.task.kind}"
                )
            if isinstance(reward, ForeignCode) and reward.early is True and self.rollout.partial:
                raise ValueError(
                    f"{section}.early=true grades samples of whole rollouts, and rollout.partial ends them early: set "
                    f"{section}.early=auto, or rollout.partial=null"
                )
            if reward.kind == "model" and reward.run_dir == self.run_dir:
                raise ValueError(
                    f"{section}.run_dir={self.run_dir} is this run's own run_dir: give the policy another folder"
                )

    @model_validator(mode="after")
    def _experts_consistent(self) -> Config:
        """What experts ask of the rest."""
        moe = self.model.moe
        if self.algorithm.kind == "distillation" and (moe.adds_loss or moe.routing_replay):
            raise ValueError(
                "algorithm.kind=distillation has no loss for routers and replays no routing: set "
                "model.moe.aux_loss_coef=0, model.moe.z_loss_coef=0 and model.moe.routing_replay=false"
            )
        if moe.routing_replay and self.rollout.partial is not None:
            raise ValueError(
                "model.moe.routing_replay cannot follow samples that go on under other weights: set it to false, or "
                "rollout.partial=null"
            )
        return self

    @model_validator(mode="after")
    def _policy_consistent(self) -> Config:
        """What sampling and a policy method ask of each other."""
        if not isinstance(self.algorithm, PolicyMethod):
            return self
        if self.rollout.samples_per_prompt == 1 and not self.algorithm.learns_alone:
            raise ValueError(
                f"rollout.samples_per_prompt=1 leaves {self.algorithm.compared} nothing to compare a sample with, so "
                "that every advantage is 0: give 2 or more, or an algorithm.kind with another baseline (remax, "
                "reinforce_plus_plus, ppo)"
            )
        if self.algorithm.compares_heads and self.reward.kind != "weighted":
            raise ValueError(
                f"reward.kind={self.reward.kind} is one number, and {self.algorithm.compared} compares the parts of a "
                "weighted reward: set reward.kind=weighted and its parts, or algorithm.kind=grpo"
            )
        if self.rollout.reshaped and self.algorithm.old_logprobs == "sampler":
            raise ValueError(
                f"{self.rollout.reshaped} cut or reshape the distribution sampled from, so its log-probs are not the "
                "policy's: set algorithm.old_logprobs=trainer"
            )
        if self.algorithm.drop_truncated and self.rollout.ends_by_length_alone:
            raise ValueError(
                "rollout.ignore_eos=true without rollout.stop and rollout.stop_token_ids lets every sample run to its "
                "limit, and algorithm.drop_truncated=true trains on none of those: set one of them to false"
            )
        if self.rollout.partial and isinstance(self.algorithm, PolicyGradient | GPG) and not self.algorithm.correction:
            raise ValueError(
                f"rollout.partial trains on tokens of earlier policies, and algorithm.kind={self.algorithm.kind} takes "
                "all as the policy's own: give it an algorithm.correction (token_tis), or a kind with a ratio (grpo)"
            )
        if self.rollout.temperature == 0:
            raise ValueError("rollout.temperature=0 samples greedily, every group is alike: give a value above 0")
        if self.data.prompts_per_step % self.algorithm.mini_batches:
            raise ValueError(
                f"data.prompts_per_step={self.data.prompts_per_step} must be a multiple of "
                f"algorithm.mini_batches={self.algorithm.mini_batches}"
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        row = self.training.row_length or self.training.tokens_per_microbatch
        if isinstance(self.algorithm, PPO) and self.algorithm.bootstrap_truncated and row <= longest:
            raise ValueError(
                "algorithm.bootstrap_truncated=true reads a value after the last token, and a row of "
                f"{row} has no room for one beyond data.max_prompt_tokens + rollout.max_new_tokens = {longest}: raise "
                "training.row_length (training.tokens_per_microbatch, where that is null)"
            )
        overlong, limit = self.algorithm.overlong, self.rollout.max_new_tokens
        if overlong is not None and overlong.buffer is not None and overlong.buffer > limit:
            raise ValueError(
                f"algorithm.overlong.buffer={overlong.buffer} is longer than rollout.max_new_tokens={limit}, the limit "
                "it is counted from: lower it"
            )
        return self
