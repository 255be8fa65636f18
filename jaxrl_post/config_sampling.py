"""What a recipe may say of how tokens are drawn and where a sample stops."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from jaxrl_post.config_base import Count, Fraction, NonNegative, Positive, Section

Text = Annotated[str, Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]

RESHAPING = (
    "top_k", "top_p", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "bad_words",
)  # fmt: skip


class SamplingKeys(Section):
    """Names and meanings are vLLM's, and so is the order: bad words, least number of tokens, bias, penalties,
    temperature, min-p, top-k, top-p."""

    max_new_tokens: PositiveInt = 64
    temperature: NonNegative = 1.0
    """0 is greedy. Log-probs for training use the same temperature."""
    top_k: Count = 0
    """Keep the k most likely tokens (ties kept); 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens whose probability reaches p, after temperature, min-p and top-k."""
    min_p: Fraction = 0.0
    """Drop tokens below this share of the likeliest one's probability; 0 keeps all."""
    min_tokens: Count = 0
    """No stop id is drawn, and no stop string heeded, before so many tokens."""
    repetition_penalty: Positive = 1.0
    """Logits of tokens in the prompt or the sample are divided by it where positive, else multiplied; 1 is none."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the sample has."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens once for each time that the sample has them."""
    logit_bias: dict[Count, Bias] = Field(default={})
    """Added to the logits of these ids; a recipe writes an id in quotes, {"42": -5}."""
    bad_words: tuple[Text, ...] = ()
    """Texts never sampled as the tokens that spell them, with a space before them or without."""
    stop: tuple[Text, ...] = Field(default=(), max_length=32)
    """A sample ends with the token that completes one of these. Its ids are trained on whole; its text, which rewards
    see, ends before the string."""
    include_stop_str_in_output: bool = False
    """Let the text end after the stop string instead."""
    stop_token_ids: tuple[Count, ...] = ()
    """Stop on these too, beside the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-sequence ids; `stop_token_ids` and `stop` still end a sample."""

    @property
    def reshaped(self) -> str:
        """The keys that make the distribution sampled from another than the policy's, as text; empty for none."""
        defaults = {key: SamplingKeys.model_fields[key].default for key in RESHAPING}
        changed = {key: getattr(self, key) for key in RESHAPING if getattr(self, key) != defaults[key]}
        return ", ".join(f"rollout.{key}={value}" for key, value in changed.items())

    @property
    def ends_by_length_alone(self) -> bool:
        """No id and no string ends a sample."""
        return self.ignore_eos and not self.stop_token_ids and not self.stop

    @model_validator(mode="after")
    def _room_to_stop(self) -> SamplingKeys:
        if self.min_tokens and self.min_tokens >= self.max_new_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} leaves no room to stop within max_new_tokens={self.max_new_tokens}: "
                "lower it"
            )
        return self
