"""The YAML that recipes are written in: the values of YAML 1.2's core schema, and nothing that can surprise.

PyYAML follows YAML 1.1, where 1e-5 is text, `no` is false and 010 is eight. Here 1e-5 is a number, true and false are
the only booleans and numbers are decimal (or 0x…, 0o…). A key given twice is refused, as are anchors, tags that build
objects, and keys that are not names.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

Keys = tuple[str, ...]

_TAG = "tag:yaml.org,2002:"
_RESOLVERS = {
    None: [
        (_TAG + "null", re.compile(r"^(?:~|null|Null|NULL|)$")),
        (_TAG + "bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")),
        (_TAG + "int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")),
        (
            _TAG + "float",
            re.compile(
                r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
                r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
            ),
        ),
    ],
    # An empty value is looked up under the empty first character.
    "": [(_TAG + "null", re.compile(r"^$"))],
}


def read(text: str) -> tuple[Any, dict[Keys, int]]:
    """The one document in `text`, and the line (from 1) of every mapping key in it. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[Keys, int] = {}
        _check(node, (), lines)
        return (None if node is None else loader.construct_document(node)), lines
    finally:
        loader.dispose()


def read_value(text: str) -> Any:
    """A value as given on the command line. Raises yaml.YAMLError, also for a text that would lose a part."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _check(node, (), {})
        if isinstance(node, yaml.ScalarNode) and text[node.end_mark.index :].strip():
            raise yaml.MarkedYAMLError(None, None, "' #' starts a comment, the rest of the value would be lost")
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def write(value: Any) -> str:
    """`value` as YAML that `read` turns back into an equal one."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def describe(error: yaml.YAMLError) -> str:
    """One line: where, and what is wrong."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        return where + " ".join(filter(None, [error.context, error.problem]))
    return " ".join(str(error).split())


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _error("anchors (&) and aliases (*) are not read: refer to another key as ${section.key}", event)
        return super().compose_node(parent, index)

    def construct_int(self, node: yaml.ScalarNode) -> int:
        text = node.value
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        try:
            return int(text, base)
        except ValueError:
            raise _error(f"{text[:20]}… is not an integer", node) from None

    def construct_float(self, node: yaml.ScalarNode) -> float:
        text = node.value.lower()
        try:
            return float(re.sub(r"\.(?=inf|nan)", "", text))
        except ValueError:
            raise _error(f"{text[:20]} is not a number", node) from None

    yaml_constructors = {  # noqa: RUF012 (PyYAML's own way to say it)
        _TAG + "null": yaml.SafeLoader.construct_yaml_null,
        _TAG + "bool": yaml.SafeLoader.construct_yaml_bool,
        _TAG + "int": construct_int,
        _TAG + "float": construct_float,
        _TAG + "str": yaml.SafeLoader.construct_yaml_str,
        _TAG + "seq": yaml.SafeLoader.construct_yaml_seq,
        _TAG + "map": yaml.SafeLoader.construct_yaml_map,
        None: yaml.SafeLoader.construct_undefined,
    }


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _RESOLVERS


def _check(node: yaml.Node | None, keys: Keys, lines: dict[Keys, int]) -> None:
    """Walk the mappings of a document: note the line of each key, refuse keys that are not text or come twice."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(item, keys, {})
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != _TAG + "str":
                raise _error("a key must be a name", key)
            path = (*keys, key.value)
            if path in lines:
                raise _error(f"key {'.'.join(path)} is given twice, first on line {lines[path]}", key)
            lines[path] = key.start_mark.line + 1
            _check(value, path, lines)


def _error(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)
