"""Recipes: a YAML file and `section.key=value` overrides become one frozen config, or an error that helps.

In a recipe `${section.key}` stands for the value of another key (OmegaConf's syntax; a literal `${` is written `\\${`).
Nothing else is looked up: no environment, no code, no other files.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from jaxrl_post import yaml12
from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig, config_class, defaults
from jaxrl_post.recipe_errors import Problem, explain
from jaxrl_post.recipe_secrets import refusal, secret_at, without_secret
from jaxrl_post.yaml12 import Keys

MAX_BYTES = 1 << 20
KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
# A dollar and brace that no odd number of backslashes hides, then what may follow: a key, absolute or relative (.key).
INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{(?P<body>[^}]*)(?P<end>\}?)")
REFERENCE = re.compile(r"\s*\.*[A-Za-z_][\w-]*(\.[\w-]+|\[[\w-]+\])*\s*")


class RecipeError(ValueError):
    """A recipe or an override cannot be used; the message has one line a problem."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config | OfflineConfig:
    """Read a recipe, set what the overrides say, check it all; `algorithm.kind` decides which schema it must fit.

    An override is `section.key=value` with the value in YAML; it replaces what was there, a whole section too. Raises
    RecipeError with every problem found, before anything touches a device.
    """
    path = Path(path)
    tree, lines = _read(path)
    origins = {keys: f"line {line}" for keys, line in lines.items()}
    for keys, value, text in _parse_overrides(overrides):
        tree = _assign(tree, keys, value, text)
        origins[keys] = f"override {text}"
    if secrets := list(secret_at(tree)):
        raise RecipeError(f"{path}: {refusal(secrets)}")
    try:
        # JSON in strict mode: a list may become a tuple and an integer a float, but text never becomes a number.
        return config_class(tree).model_validate_json(json.dumps(_interpolate(tree, path)), strict=True)
    except ValidationError as error:
        problems = explain(error, tree)
    raise RecipeError(_message(path, problems, origins))


def dump(config: Config | OfflineConfig) -> str:
    """The whole config as YAML, defaults too. `load` reads it back as an equal config."""
    return yaml12.write(_escape(config.model_dump(mode="json")))


def changes(before: str, after: str) -> list[str]:
    """`section.key: old → new` for every value that differs between two dumped configs; a text that is no YAML has
    none."""
    try:
        old, new = (dict(_values(yaml12.read_value(text), "")) for text in (before, after))
    except (yaml.YAMLError, RecursionError):
        return [f"{before.splitlines()[:1]} and what follows, which is no recipe"]
    keys = [*new, *(key for key in old if key not in new)]
    told = lambda values, key: json.dumps(values[key]) if key in values else "unset"
    return [f"{key}: {told(old, key)} → {told(new, key)}" for key in keys if told(old, key) != told(new, key)]


def _values(tree: Any, key: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield key, tree
        return
    for name, value in tree.items():
        yield from _values(value, f"{key}.{name}".lstrip("."))


def schema() -> dict[str, Any]:
    """JSON Schema of recipes, for editors: what configs/schema.json holds."""
    either = TypeAdapter(Config | OfflineConfig).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | either


def _read(path: Path) -> tuple[dict[str, Any], dict[Keys, int]]:
    text = _text(path)
    try:
        tree, lines = yaml12.read(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: {yaml12.describe(error)}") from None
    except RecursionError:
        raise RecipeError(f"{path}: nested too deeply to be a recipe") from None
    if tree is None:
        raise RecipeError(f"{path}: empty; a recipe needs at least a model section")
    if not isinstance(tree, dict):
        found = "a list" if isinstance(tree, list) else "a single value"
        raise RecipeError(f"{path}: a recipe is a mapping of sections, this is {found}")
    return tree, lines


def _text(path: Path) -> str:
    if path.is_dir():
        run = path / "config.yaml"
        raise RecipeError(f"{path} is a folder, not a recipe" + (f"; did you mean {run}?" if run.is_file() else ""))
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        near = get_close_matches(path.name, [other.name for other in path.parent.glob("*.y*ml")], n=1)
        meant = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise RecipeError(f"no recipe at {path}{meant}") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from None
    if len(data) > MAX_BYTES:
        raise RecipeError(f"{path}: over {MAX_BYTES} bytes, not a recipe")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start}); a recipe is a YAML file") from None


def _parse_overrides(overrides: Sequence[str]) -> Iterator[tuple[Keys, Any, str]]:
    """Keys, value and original text of each override; two that set the same key are refused."""
    seen: dict[Keys, str] = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        text = without_secret(text)
        if not equals or not KEY.fullmatch(name):
            raise RecipeError(f"override {text!r}: write section.key=value, without spaces around the = or dashes")
        keys = tuple(name.split("."))
        clash = [other for other in seen if other[: len(keys)] == keys or keys[: len(other)] == other]
        if clash:
            raise RecipeError(f"overrides {seen[clash[0]]!r} and {text!r} set the same key: give one of them")
        seen[keys] = text
        yield keys, _override_value(text, value), text


def _override_value(text: str, value: str) -> Any:
    try:
        return yaml12.read_value(value)
    except (yaml.YAMLError, RecursionError) as error:
        problem = yaml12.describe(error) if isinstance(error, yaml.YAMLError) else "nested too deeply"
        raise RecipeError(f"override {text!r}: {problem}; quote text as '{text.partition('=')[0]}=\"…\"'") from None


def _assign(tree: Any, keys: Keys, value: Any, text: str, done: Keys = ()) -> dict[str, Any]:
    """`tree` with the value at `keys`; sections that are not there yet are made."""
    if tree is not None and not isinstance(tree, dict):
        raise RecipeError(f"override {text!r}: {'.'.join(done)} is {tree!r}, a value and not a section")
    key, rest = keys[0], keys[1:]
    section = tree or {}
    return section | {key: _assign(section.get(key), rest, value, text, (*done, key)) if rest else value}


def _interpolate(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    """`tree` with references filled in; they may also name keys left at their defaults."""
    found = [text for text in _strings(tree) if "${" in text]
    if not found:
        return tree
    for text in found:
        _check_references(text, path)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(_over(defaults(tree), tree)), resolve=True)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{path}: {error.full_key}: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise RecipeError(f"{path}: a ${{…}} reference leads back to itself") from None
    return _pick(tree, resolved)


def _check_references(text: str, path: Path) -> None:
    for match in INTERPOLATION.finditer(text):
        if not match["end"] or not REFERENCE.fullmatch(match["body"]):
            raise RecipeError(
                f"{path}: {text!r}: only another key can be referred to, as ${{section.key}}; "
                "a literal ${ is written \\${"
            )


def _strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    if isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _strings(item)


def _over(defaults: Any, tree: Any) -> Any:
    """`tree` with the defaults it does not mention; a section of another kind has no defaults here."""
    if not isinstance(defaults, dict) or not isinstance(tree, dict):
        return tree
    if tree.get("kind", defaults.get("kind")) != defaults.get("kind"):
        return tree
    return defaults | {key: _over(defaults.get(key), value) for key, value in tree.items()}


def _pick(tree: Any, resolved: Any) -> Any:
    """`tree` with the strings that hold a reference taken from `resolved`, all else untouched."""
    if isinstance(tree, dict):
        return {key: _pick(value, resolved[key]) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_pick(value, other) for value, other in zip(tree, resolved, strict=True)]
    return resolved if isinstance(tree, str) and "${" in tree else tree


def _escape(value: Any) -> Any:
    """Text that reads `${` after references are filled in, for every string that holds one."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    return value


def _message(path: Path, problems: Sequence[Problem], origins: dict[Keys, str]) -> str:
    lines = [f"{problem.text}{_origin(problem.keys, origins)}" for problem in problems]
    if len(lines) == 1:
        return f"{path}: {lines[0]}"
    return "\n".join([f"{path}: {len(lines)} problems", *(f"  {line}" for line in lines)])


def _origin(keys: Keys, origins: dict[Keys, str]) -> str:
    """Where a value was given: the override or line of the key, of a key inside it, or of the section that lacks it."""
    above = (keys[:end] for end in range(len(keys), 0, -1))
    inside = (given for given in origins if keys and given[: len(keys)] == keys)
    where = next((given for given in (*above, *inside) if given in origins), None)
    return f" [{origins[where]}]" if where else ""


if __name__ == "__main__":  # python -m jaxrl_post.recipes > configs/schema.json
    json.dump(schema(), sys.stdout, indent=2)
    print()
