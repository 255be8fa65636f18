"""What is wrong with a recipe, said so that it can be fixed without looking anything up.

Turns what pydantic found into one line a problem: the full dotted key, its section, the value, what is allowed there
and the nearest name that exists.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jaxrl_post import yaml12
from jaxrl_post.config_base import Section
from jaxrl_post.config_offline import config_class
from jaxrl_post.yaml12 import Keys

# What people coming from other systems (verl, TRL, OpenRLHF, transformers) type.
SYNONYMS = {
    "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2",
    "adv_estimator": "algorithm.kind",
    "beta": "algorithm.kl.coef",
    "beta1": "optimizer.b1",
    "beta2": "optimizer.b2",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "entropy_coeff": "algorithm.entropy_coef",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "evaluation.every",
    "grad_clip": "optimizer.max_grad_norm",
    "kl_coef": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "learning_rate": "optimizer.learning_rate",
    "loss_agg_mode": "algorithm.aggregation",
    "lr": "optimizer.learning_rate",
    "max_completion_length": "rollout.max_new_tokens",
    "max_off_policy_threshold": "rollout.partial.max_age",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "steps",
    "model_name_or_path": "model.path",
    "n": "rollout.samples_per_prompt",
    "norm_adv_by_std_in_grpo": "algorithm.normalize_by_std",
    "num_generations": "rollout.samples_per_prompt",
    "num_iterations": "algorithm.epochs",
    "num_train_epochs": "steps",
    "output_dir": "run_dir",
    "partial_rollout": "rollout.partial",
    "per_device_train_batch_size": "training.tokens_per_microbatch",
    "ppo_epochs": "algorithm.epochs",
    "ppo_max_token_len_per_gpu": "training.tokens_per_microbatch",
    "precompute_ref_log_probs": "training.cache_reference",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "tensor_model_parallel_size": "mesh.tensor",
    "test_freq": "evaluation.every",
    "total_training_steps": "steps",
    "train_batch_size": "data.prompts_per_step",
}


class Problem(NamedTuple):
    keys: Keys  # of the value at fault; () is the recipe as a whole
    text: str


def explain(error: ValidationError, tree: dict[str, Any]) -> list[Problem]:
    """One problem for each key at fault, in the order found."""
    texts: dict[Keys, list[str]] = {}
    for detail in error.errors(include_url=False):
        keys = _keys(detail["loc"], tree, missing=detail["type"] == "missing")
        texts.setdefault(keys, []).append(_text(detail, keys, tree))
    return [Problem(keys, _joined(keys, found)) for keys, found in texts.items()]


def suggest(keys: Keys, tree: dict[str, Any]) -> list[str]:
    """Dotted keys that `keys`, which does not exist, may have been meant to be; the likeliest first, at most three."""
    name, here = keys[-1], fields_at(keys[:-1], tree)
    known = list(dict.fromkeys(all_keys(config_class(tree), ())))
    exact = [".".join(key) for key in known if key[-1] == name]
    close_here = [".".join((*keys[:-1], near)) for near in _close(name, list(here))]
    close = [".".join(key) for near in _close(name, [key[-1] for key in known]) for key in known if key[-1] == near]
    synonym = [SYNONYMS[name]] if tuple(SYNONYMS.get(name, "").split(".")) in known else []
    return (synonym or exact or close_here or close)[:3]


def fields_at(keys: Keys, tree: dict[str, Any]) -> dict[str, FieldInfo]:
    """The fields a section may have, its kind being what the recipe says or the default; {} where no section is."""
    sections: list[type[Section]] = [config_class(tree)]
    named: list[FieldInfo] = []  # the next key is a name of the recipe's own, for a section of one of these fields
    node: Any = tree
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
        fields = named or [section.model_fields[key] for section in sections if key in section.model_fields]
        named = [] if named else [field for field in fields if _holds_named(field)]
        sections = [] if named else [section for field in fields for section in _of_kind(field, node)]
    return {name: field for section in sections for name, field in section.model_fields.items()}


def _keys(loc: tuple[int | str, ...], tree: Any, missing: bool) -> Keys:
    """`loc` without what pydantic adds to a path: the names of union members."""
    keys: list[str] = []
    entered = True  # a section's kind comes before its keys, one of which may have the same name: reward.function
    for i, part in enumerate(loc):
        absent = missing and i == len(loc) - 1
        of_kind = entered and not absent and isinstance(tree, dict) and part == tree.get("kind")
        known = (isinstance(tree, dict) and part in tree) or (isinstance(tree, list) and isinstance(part, int))
        entered = known and not of_kind
        if entered:
            tree = tree[part]
        elif not absent:
            continue
        keys.append(str(part))
    return tuple(keys)


def _joined(keys: Keys, texts: list[str]) -> str:
    first, *others = dict.fromkeys(texts)  # several, where none of the types a value may have fits
    text = " or ".join([first, *(other.partition(": must be ")[2] for other in others)])
    dotted = ".".join(keys)
    return text if not keys or f"{dotted}." in text else f"{dotted}: {text}"


def _text(detail: Any, keys: Keys, tree: dict[str, Any]) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return _unknown(keys, value, tree)
    if kind in ("missing", "union_tag_not_found"):
        field = fields_at(keys[:-1], tree)[keys[-1]]
        kinds, doc = _kinds(field), f" ({field.description})" if field.description else ""
        if kinds:
            return f"{'.'.join(keys)}.kind is required, and missing{doc}: give one of {', '.join(kinds)}"
        return f"required, and missing {_section(keys, tree)}{doc}"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "union_tag_invalid":
        tag, allowed = detail["ctx"]["tag"], detail["ctx"]["expected_tags"].replace("'", "")
        return f"kind {'null' if tag == 'None' else tag} is not one of {allowed}" + _perhaps(tag, allowed.split(", "))
    if value is None and fields_at(keys, tree):
        return "this section is empty: give its keys or remove it"
    if kind in ("model_type", "model_attributes_type"):
        return f"{_show(value)} is not allowed: this is a section, with keys {', '.join(fields_at(keys, tree))}"
    allowed = detail["msg"].replace("Input should be", "must be").replace("String should", "must")
    allowed = allowed.replace("a valid array", "a list").replace("a valid string", "text")
    return f"{_show(value)} is not allowed {_section(keys, tree)}: {allowed}" + _hint(detail)


def _unknown(keys: Keys, value: Any, tree: dict[str, Any]) -> str:
    text = f"no such key {_section(keys, tree)} (value {_show(value)})"
    others = _kinds_with(keys, tree)
    if others:
        return f"{text}; it belongs to kind {' and '.join(others)}"
    if "." in keys[-1]:
        section, _, name = keys[-1].rpartition(".")
        return f"{text}. Write {name} under section {section}, dots are for overrides"
    near = suggest(keys, tree)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"{text}.{meant} Keys there: {', '.join(fields_at(keys[:-1], tree))}"


def _section(keys: Keys, tree: dict[str, Any]) -> str:
    """`in section optimizer`, `in section data.task of kind arithmetic`, `at the top level`."""
    if len(keys) < 2:
        return "at the top level"
    fields = fields_at(keys[:-1], tree)
    of_kind = f" of kind {_kind(fields)}" if "kind" in fields else ""
    return f"in section {'.'.join(keys[:-1])}{of_kind}"


def _kinds_with(keys: Keys, tree: dict[str, Any]) -> list[str]:
    """The other kinds of this section that do have the key."""
    if len(keys) < 2:
        return []
    field = fields_at(keys[:-2], tree).get(keys[-2])
    return _kinds(field, keys[-1]) if field else []


def _kinds(field: FieldInfo, key: str = "kind") -> list[str]:
    """The kinds a section may be of, of those that have `key`; none where it has no `kind`."""
    sections = [section.model_fields for section in _sections(field.annotation)]
    return [_kind(fields) for fields in sections if key in fields and "kind" in fields]


def _hint(detail: Any) -> str:
    kind, value = detail["type"], detail["input"]
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind == "string_type" and isinstance(value, bool | int | float):
        return f'; write "{json.dumps(value)}" with the quotes'
    if kind == "literal_error" and isinstance(value, str):
        return _perhaps(
            value, [part.strip("'") for part in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        )
    if kind == "bool_type" and str(value).lower() in ("yes", "no", "on", "off", "0", "1"):
        return "; write true or false"
    if kind in ("int_type", "float_type") and isinstance(value, str) and _is_number(value):
        return "; it is text: remove the quotes"
    return ""


def _is_number(text: str) -> bool:
    try:
        return isinstance(yaml12.read_value(text), int | float)
    except yaml.YAMLError:
        return False


def _perhaps(value: str, allowed: list[str]) -> str:
    near = _close(value, allowed)
    return f". Did you mean {near[0]}?" if near else ""


def _close(name: str, known: list[str]) -> list[str]:
    swapped = [other for other in known if sorted(other) == sorted(name)]  # gpro: nearer to grpo than to gspo
    longer = [other for other in known if len(name) > 2 and (other.startswith(name) or name.startswith(other))]
    return list(dict.fromkeys([*swapped, *difflib.get_close_matches(name, known, n=3), *longer]))


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def all_keys(section: type[Section], prefix: Keys) -> Iterator[Keys]:
    """The path of every key that the section, at `prefix`, may hold, of all its kinds; a name of one's own is NAME."""
    for name, field in section.model_fields.items():
        yield (*prefix, name)
        for inner in _sections(field.annotation):
            yield from all_keys(inner, (*prefix, name, "NAME") if _holds_named(field) else (*prefix, name))


def _sections(annotation: Any) -> list[type[Section]]:
    """The section types a field's annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


def _holds_named(field: FieldInfo) -> bool:
    """Whether it is a mapping from names to sections."""
    either = (field.annotation, *get_args(field.annotation))
    return any(get_origin(annotation) is dict for annotation in either) and bool(_sections(field.annotation))


def _of_kind(field: FieldInfo, node: Any) -> list[type[Section]]:
    """The one of a field's sections the recipe asks for by `kind`; all of them when there is no telling."""
    sections = _sections(field.annotation)
    if len(sections) < 2:
        return sections
    default = getattr(field.default, "kind", None)
    wanted = node.get("kind", default) if isinstance(node, dict) else default
    return [section for section in sections if _kind(section.model_fields) == wanted] or sections


def _kind(fields: dict[str, FieldInfo]) -> str:
    """The one word that a section's `kind` may be."""
    return get_args(fields["kind"].annotation)[0]
