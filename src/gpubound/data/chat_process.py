"""The process that renders chat templates. data/chat.py starts it; it imports nothing of the library.

A chat template is a program that comes with a downloaded tokenizer. Jinja's sandbox keeps it from files and modules, but not
from looping for hours or asking for 10 GB, so it runs here, under the kernel's limits on memory and CPU time.

Each line of the input is a JSON object: template, messages, prompt, names. Each line of the output is another: text and spans,
the (begin, end) of every {% generation %} block; or error.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from secrets import token_hex

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30
LARGEST = 16_000_000  # characters beyond four times those of the messages


class GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %} surrounds what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in ("generation_begin", "generation_end"))
        return [begin, *body, end]


def refuse(message):
    """Raise the error of a template that does not support the chat."""
    raise TemplateError(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Format as JSON, without the HTML escapes of jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(8)
def compiled(template):
    """Compile `template` with the names and options that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(template)


def render(template, messages, prompt, names):
    begin, end = token_hex(16), token_hex(16)
    blocks = {"generation_begin": begin, "generation_end": end}
    variables = {"tools": None, "documents": None, "messages": messages, "add_generation_prompt": prompt}
    first, *rest = compiled(template).render(**variables | names | blocks).split(begin)
    text, spans = first.replace(end, ""), []
    for part in rest:
        inside, closed, after = part.partition(end)
        if closed:
            spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return {"text": text, "spans": spans}


def answer(request, size):
    try:
        result = render(**request)
    except MemoryError:
        return {"error": f"it asks for more than {MEMORY >> 20} MB of memory"}
    except Exception as error:  # a template is a program, and may raise anything
        return {"error": str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"}
    if len(result["text"]) > LARGEST + 4 * size:
        return {"error": f"it wrote {len(result['text']):,} characters for {size:,} of messages"}
    return result


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    seconds = float(sys.argv[1])  # of CPU time a chat
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)  # its signal, SIGVTALRM, ends this process
        reply = json.dumps(answer(json.loads(line), len(line)))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(reply, flush=True)


if __name__ == "__main__":
    main()
