"""Chat templates: untrusted Jinja from a model folder, rendered in a sandbox with the conventions of transformers.

The sandbox is in a process of its own (`template_process`), which bounds memory and time.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from jaxrl_post.data.template_process import renderer

RENDER_SECONDS = 10.0
Message = dict[str, Any]
"""One turn: {"role": "user", "content": "…"}; a template may know further keys."""


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text in some templates; its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace()`, refusing names that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold the name {name!r}")
        super().__setitem__(name, value)


class Sandbox(ImmutableSandboxedEnvironment):
    """Raises on every unsafe attribute, where Jinja's own sandbox first hands out an undefined value."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__} is refused")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter; keys keep their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def sandbox() -> Sandbox:
    """An environment with all that chat templates may use."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": Namespace,
    }
    return environment


def compile_own(source: str) -> Callable[..., str]:
    """As `compile_template` for a template of this project's own: rendered in this process, without limits."""
    template = sandbox().from_string(source)

    def render(messages: list[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)

    return render


def compile_template(source: str, origin: str) -> Callable[..., str]:
    """Turns template text into `render(messages, add_generation_prompt, **variables) -> str`.

    `origin` names the template's file in errors. `tools` and `documents` are None unless given, as in transformers.
    Raises ValueError for a template that does not parse, and when rendering: for what the template itself refuses
    (`raise_exception`), for attempts to leave the sandbox, for values the template cannot work with, for one that
    takes longer than `RENDER_SECONDS`, and for one that takes or makes more than `template_process` allows.
    """
    try:
        sandbox().parse(source)  # compiled and run only in a process that can be killed
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(f"{origin}: the chat template does not parse: {error}") from error

    def render(messages: list[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        values = {"tools": None, "documents": None, **variables}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            answer = renderer().render(source, values, RENDER_SECONDS)
        except (ValueError, TypeError, RecursionError, TimeoutError, MemoryError) as error:
            raise ValueError(f"{origin}: the chat template cannot render these messages: {error}") from error
        if "refused" in answer:
            raise ValueError(f"{origin}: the chat template tries to leave its sandbox: {answer['refused']}")
        if "failed" in answer:
            raise ValueError(f"{origin}: the chat template cannot render these messages: {answer['failed']}")
        return answer["text"]

    return render
