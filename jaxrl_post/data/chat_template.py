"""Chat templates: untrusted Jinja from a model folder, rendered in a sandbox with the conventions of transformers."""

from __future__ import annotations

import datetime
import json
import queue
import threading
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

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


def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": Namespace,
    }
    return environment


def _within(seconds: float, work: Callable[[], str]) -> str:
    """The result of `work`, done on a thread of its own. One that takes longer is left behind: it may never end."""
    outcome: queue.SimpleQueue[tuple[str, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except Exception as error:
            outcome.put(("", error))

    threading.Thread(target=run, daemon=True).start()
    try:
        text, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"it has not ended after {seconds:g} s") from None
    if error is not None:
        raise error
    return text


def compile_template(source: str, origin: str) -> Callable[..., str]:
    """Turns template text into `render(messages, add_generation_prompt, **variables) -> str`.

    `origin` names the template's file in errors. `tools` and `documents` are None unless given, as in transformers.
    Raises ValueError for a template that does not parse, and when rendering: for what the template itself refuses
    (`raise_exception`), for attempts to leave the sandbox, for values the template cannot work with, and for one that
    takes longer than `RENDER_SECONDS`.
    """
    try:
        template = _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"{origin}: the chat template does not parse: {error}") from error

    def render(messages: list[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        values = {"tools": None, "documents": None, **variables}
        try:
            return _within(
                RENDER_SECONDS,
                lambda: template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values),
            )
        except SecurityError as error:
            raise ValueError(f"{origin}: the chat template tries to leave its sandbox: {error}") from error
        except Exception as error:  # the template's own code runs here, and may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{origin}: the chat template cannot render these messages: {reason}") from error

    return render
