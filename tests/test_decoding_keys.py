"""Sampling keys of a recipe: what is refused, what becomes of them, and the text of a sample that a string stopped."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers

from jaxrl_post import recipes
from jaxrl_post.data.tokenizer import ByteTokenizer, FolderTokenizer
from jaxrl_post.loops.decoding import bad_word_ids, decoding, greedy_decoding, text_of
from jaxrl_post.loops.job import build
from jaxrl_post.rollout.stop_strings import completed_by_last
from jaxrl_post.types import Completion, StopReason

TINY = Path(__file__).parent.parent / "configs" / "tiny" / "grpo.yaml"
RESHAPING = ["min_p=0.1", "min_tokens=2", "repetition_penalty=1.1", "presence_penalty=0.5", "frequency_penalty=-0.5",
             "logit_bias={'65': -2.5}", "bad_words=[no]", "top_k=5", "top_p=0.9"]  # fmt: skip


def load(*overrides):
    return recipes.load(TINY, [f"rollout.{o}" if not o.startswith("algorithm") else o for o in overrides])


@pytest.mark.parametrize("override", RESHAPING)
def test_what_reshapes_the_distribution_asks_for_the_trainers_log_probs(override):
    with pytest.raises(ValueError, match=r"rollout\.\w+=.* reshape the distribution .*algorithm.old_logprobs=trainer"):
        load(override)
    config = load(override, "algorithm.old_logprobs=trainer")
    assert config == recipes.config_class({}).model_validate_json(config.model_dump_json())
    changed = decoding(config, ByteTokenizer())
    name = override.partition("=")[0]
    assert changed[name] != decoding(load(), ByteTokenizer())[name]


def test_stops_alone_leave_the_samplers_log_probs_as_they_are():
    config = load("stop=[x, '\\n\\n']", "ignore_eos=true", "include_stop_str_in_output=true")
    assert config.rollout.reshaped == ""
    assert decoding(config, ByteTokenizer())["stop"] == ("x", "\\n\\n")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["min_p=1.1"], "rollout.min_p"),
        (["repetition_penalty=0"], "rollout.repetition_penalty"),
        (["logit_bias={'3': 101}"], "rollout.logit_bias.3"),
        (["logit_bias={'-3': 1}"], "rollout.logit_bias"),
        (["stop=['']"], "rollout.stop"),
        (["min_tokens=64", "max_new_tokens=64"], "min_tokens=64 leaves no room to stop within max_new_tokens=64"),
        (["ignore_eos=true", "algorithm.drop_truncated=true"], "rollout.ignore_eos=true without rollout.stop"),
    ],
)
def test_keys_that_cannot_be_are_refused_by_name(overrides, told):
    with pytest.raises(ValueError, match=told.replace(".", r"\.")):
        load(*overrides)


def test_ids_outside_the_vocabulary_are_refused_before_any_weight():
    with pytest.raises(ValueError, match=r"rollout.logit_bias: ids \[9999\] are outside the model's vocabulary"):
        build(load("logit_bias={'9999': 1}", "algorithm.old_logprobs=trainer"))


def test_the_models_own_stop_ids_can_be_ignored():
    assert build(load()).stop_ids == {257}
    assert build(load("ignore_eos=true", "stop_token_ids=[10]")).stop_ids == {10}


def test_greedy_decoding_keeps_what_is_no_chance():
    config = load(*RESHAPING, "stop=[x]", "algorithm.old_logprobs=trainer")
    sampled, greedy = (f(config, ByteTokenizer()) for f in (decoding, greedy_decoding))
    assert {k for k in sampled if sampled[k] != greedy[k]} == {"temperature", "top_k", "top_p", "min_p"}
    assert sampled["logit_bias"] == ((65, -2.5),)
    assert bad_word_ids(("no", " no"), ByteTokenizer()) == ((110, 111), (32, 110, 111))


def byte_level(folder):
    """A byte-level BPE with merges across spaces, a special token and an added one."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"])
    tokenizer.train_from_iterator(["the end é€ the end\n\nthe answer is\n" * 9], trainer)
    tokenizer.add_tokens(["<tool>", "«é»"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return FolderTokenizer(folder)


def test_the_bytes_of_tokens_are_their_text(tmp_path):
    rng = np.random.default_rng(0)
    for tokenizer in (byte_level(tmp_path), ByteTokenizer()):
        spelt = tokenizer.token_bytes()
        for ids in rng.integers(0, len(spelt), (200, 12)).tolist():
            assert b"".join(spelt[i] for i in ids).decode(errors="replace") == tokenizer.decode(ids)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path):
    tokenizer = byte_level(tmp_path)._tokenizer
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"not byte-level.*rollout.stop_token_ids"):
        FolderTokenizer(tmp_path).token_bytes()


def test_the_text_ends_where_the_string_that_stopped_it_begins(tmp_path):
    tokenizer, rng = byte_level(tmp_path), np.random.default_rng(1)
    spelt, strings, hits = tokenizer.token_bytes(), ("\n", "en", "é", "e"), 0
    for ids in rng.choice([*tokenizer.encode("the end é€\n\nanswer"), *range(1, 60)], (400, 6)).tolist():
        string = completed_by_last(strings, [spelt[i] for i in ids])
        completion = Completion(0, np.array(ids), None, None, StopReason.STOP, string)
        whole = tokenizer.decode(ids)
        if string is None:
            assert text_of(completion, tokenizer, False) == whole
            continue
        hits += 1
        cut, kept = (text_of(completion, tokenizer, with_string) for with_string in (False, True))
        assert kept == cut + string
        assert whole.startswith(kept)
        assert len(b"".join(spelt[i] for i in ids[:-1])) < len(whole[: len(kept)].encode())
    assert hits > 25


def test_rewards_see_the_text_and_training_the_tokens():
    """`grade` with two samples of the same ids, one of them stopped by a string."""
    from jaxrl_post.loops.gather import grade

    ids = np.array([*b"42. and"], np.int32)
    seen = []
    for config, text in ((load("stop=[an]"), "42. "), (load("stop=[an]", "include_stop_str_in_output=true"), "42. an")):
        job = SimpleNamespace(config=config, tokenizer=ByteTokenizer(), reward=lambda r: seen.extend(r))
        rollout = SimpleNamespace(completions=[Completion(0, ids[:6], None, None, StopReason.STOP, "an")])
        assert grade(job, [None], rollout)[0] == [text]
    assert all(itertools.chain(r.ids.tolist() == ids[:6].tolist() for r in seen))
