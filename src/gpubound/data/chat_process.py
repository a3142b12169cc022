"""The process that renders chat templates. data/chat.py starts it; it imports nothing of the library.

A chat template is a program that comes with a downloaded tokenizer. Jinja's sandbox keeps it from files and modules, but not
from looping for hours or asking for 10 GB, so it runs here, under the kernel's limits on memory and CPU time.

Each line of the input is a JSON object: template, names (more variables) and chats. A chat has messages, tools, and either
prompt, to be rendered, or train_on and given, for the spans that are learnt. Each line of the output is a list with an object a
chat: text and spans, the (begin, end) of every {% generation %} block or of what is learnt; or error.
"""

import json
import re
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache, partial
from itertools import pairwise
from secrets import token_hex

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30
MARK = re.compile(r"<[^<>\s]{1,64}>")
UNCLEAR = (
    "the assistant's part of its text cannot be found, so the prompts cannot be masked; use a template that writes each "
    "message once, or one with {% generation %} blocks"
)
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


def render(template, names, messages, prompt=False, tools=None):
    """Return the chat as text, and the spans of the template's {% generation %} blocks."""
    begin, end = token_hex(16), token_hex(16)
    blocks = {"generation_begin": begin, "generation_end": end}
    variables = {"tools": tools, "documents": None, "messages": messages, "add_generation_prompt": prompt}
    first, *rest = compiled(template).render(**variables | names | blocks).split(begin)
    text, spans = first.replace(end, ""), []
    for part in rest:
        inside, closed, after = part.partition(end)
        if closed:
            spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, spans


def write_chat(render, messages, train_on, given):
    """Return the chat as text, and the spans to learn: the assistant's messages, each with the end of its turn.

    render    renders messages; with prompt=True up to the beginning of the assistant's answer
    train_on  "assistant", "last" (the assistant's last message) or "all" (the whole text)
    given     the first messages, of which nothing is learnt, nor of those whose "weight" is 0
    """
    text, spans = render(messages)
    if train_on == "all":
        return text, [(0, len(text))]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    unlearnt = {i for i in answers if i < given or messages[i].get("weight") == 0}
    is_part = bool(unlearnt) or train_on == "last"
    if not spans or (is_part and len(spans) != len(answers)):  # no {% generation %} blocks, or several a message
        spans = [span_of(render, messages, i, text) for i in answers]
    if any(begin > end for begin, end in spans) or any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        raise TemplateError(UNCLEAR)
    if is_part:
        spans = [span for i, span in zip(answers, spans) if i not in unlearnt]
    return text, spans[-1:] if train_on == "last" else spans


def check_tools(chat, text):
    """Refuse a template that leaves tools or calls out: the model would learn to say nothing where it calls one."""
    calls = [call["function"] for message in chat["messages"] for call in message.get("tool_calls", ())]
    for tool in [*calls, *(tool.get("function", tool) for tool in chat["tools"] or ())]:
        if isinstance(tool, dict) and str(tool.get("name", "")) not in text:
            raise TemplateError(
                f"it does not write the tool {tool['name']!r}; take a template with tools and their calls, as models for tools "
                "have, or leave them out of the rows"
            )


def span_of(render, messages, i, text):
    """Return the span of message `i` in `text`, the whole chat."""
    asked = render(messages[:i], prompt=True)[0]
    answered = render(messages[: i + 1])[0] if i + 1 < len(messages) else text
    is_prefix = text.startswith(answered) and answered.startswith(asked)
    return (len(asked), len(answered)) if is_prefix else find_span(render, messages, i, text)


def find_span(render, messages, i, text):
    """Return the span of message `i` in `text`, for a template that renders earlier messages depending on later ones.

    Qwen3's template leaves out the reasoning of earlier turns, so the chat up to message `i` is no prefix of `text`. Render the
    chat with two other contents of message `i` instead: the results differ exactly there. Before it is as much of the header
    that a prompt ends with as the template writes here, after it as much of the end that a last turn has.
    """
    last = render([*messages[:i], messages[i] | {"content": "\ue000" * 8}])[0]
    turn_end = last.rpartition("\ue000" * 8)[2]
    one, other = (
        render([*messages[:i], messages[i] | {"content": letter * 8}, *messages[i + 1 :]])[0] for letter in "\ue000\ue001"
    )
    before, after = common(one, other), common(one[::-1], other[::-1])
    if before == len(one):
        raise TemplateError(UNCLEAR)
    asked, prompt = render(messages[:i])[0] if i else "", render(messages[:i], prompt=True)[0]
    header = prompt[len(asked) :] if prompt.startswith(asked) else ""
    if not header and i:  # the template ends a prompt with the end of the user's turn
        marked = [*messages[: i - 1], messages[i - 1] | {"content": "\ue000" * 8}]
        header = render(marked, prompt=True)[0].rpartition("\ue000" * 8)[2]
    at = one.rfind(header.partition(">")[0].partition("\n")[0], 0, before) if header else before
    if at < 0:
        raise TemplateError(UNCLEAR)
    begin = min(at + whole(one[at:], common(one[at:before], header)), whole(text, common(text, one)))
    tail = one[len(one) - after :]
    length = common(tail, turn_end)
    if (shorter := whole(tail, length)) < length:
        first = MARK.match(tail, shorter)
        length = shorter if MARK.search(tail[:shorter]) or first is None else first.end()
    end = len(one) - after + length + len(text) - len(one)
    if begin < at or text[end:] != one[len(one) - (len(text) - end) :]:
        raise TemplateError(UNCLEAR)
    return begin, end


def whole(text, at):
    """Return `at`, or the beginning of the mark, as `<|end|>`, that `at` is inside of."""
    mark = MARK.match(text, max(0, text.rfind("<", 0, at)))
    return mark.start() if mark is not None and mark.start() < at < mark.end() else at


def common(one, other):
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def answer(template, names, chat, size):
    try:
        if "train_on" in chat:
            rendered = partial(render, template, names, tools=chat["tools"])
            text, spans = write_chat(rendered, chat["messages"], chat["train_on"], chat["given"])
            check_tools(chat, text)
        else:
            text, spans = render(template, names, **chat)
    except MemoryError:
        return {"error": f"it asks for more than {MEMORY >> 20} MB of memory"}
    except Exception as error:  # a template is a program, and may raise anything
        return {"error": str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"}
    if len(text) > LARGEST + 4 * size:
        return {"error": f"it wrote {len(text):,} characters for {size:,} of messages"}
    return {"text": text, "spans": spans}


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    seconds = float(sys.argv[1])  # of CPU time a chat
    for line in sys.stdin:
        request, replies = json.loads(line), []
        for chat in request["chats"]:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)  # its signal, SIGVTALRM, ends this process
            replies.append(answer(request["template"], request["names"], chat, len(line)))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(json.dumps(replies), flush=True)


if __name__ == "__main__":
    main()
