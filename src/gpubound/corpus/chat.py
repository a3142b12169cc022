"""Chats as text: the chat templates that come with tokenizers, in jinja, rendered as transformers renders them."""

import json
from datetime import datetime
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import DataError

Message = dict[str, Any]


def render(template: str, messages: list[Message], prompt: bool, **names: Any) -> str:
    """The chat as text. With `prompt` it ends where the assistant's answer begins. `names` are the template's other variables.

    By transformers where it is installed, so that the text is the one its models were trained on; else by the same rules here.
    A template comes with a downloaded tokenizer, so either way it runs in a sandbox.
    """
    try:
        if find_spec("transformers") is None:
            return _compiled(template).render(messages=messages, add_generation_prompt=prompt, **names)
        from transformers.utils.chat_template_utils import render_jinja_template

        made = render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt, **names)
        return made[0][0]
    except Exception as error:  # a template is a program, and may raise anything
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise DataError(f"chat template: {kind}{error}") from error


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant wrote; the text inside is kept as it is."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(template)


def _refuse(message: str) -> None:
    """Templates call it on chats that their model never saw."""
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Without the HTML escapes of jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def ends_of_turn(tokenizer: Any) -> list[int]:
    """The special token that the chat template writes behind an answer: often another one than the end of a text."""
    if tokenizer.chat_template is None:
        return []
    asked = [{"role": "user", "content": "a"}]
    try:
        prompt = tokenizer.render(asked, prompt=True)
        whole = tokenizer.render([*asked, {"role": "assistant", "content": "b"}])
    except DataError as error:
        raise DataError(f"the chat template cannot write a question and its answer: {error}") from error
    tail = whole[len(prompt) :].partition("b")[2] if whole.startswith(prompt) else whole.rpartition("b")[2]
    special = {i for i, token in tokenizer.inner.get_added_tokens_decoder().items() if token.special}
    return [i for i in tokenizer.inner.encode(tail, add_special_tokens=False).ids if i in special][:1]
