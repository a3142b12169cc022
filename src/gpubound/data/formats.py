"""Row formats: which keys a row has, and the document that it becomes. One function a format, listed in FORMATS.

A document is one example: a text, a chat, a prompt with its completion, a preference between two answers, a text of a class, or
a question with the text that answers it. Errors begin with `where`, the file and line of the row.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple

from ..errors import DataError
from ..formatting import shown
from ..trace import notice

Messages = list[dict[str, Any]]

MATCHES = "matches"
MAX_DEPTH = 64  # of a message's other fields: a template may print them, and Python recurses a thousand deep
MAX_LISTED = 8  # keys that an error lists
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "bot": "assistant", "function_call": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
KNOWN_ROLES = {*ROLES, "developer", "ipython", "tools", "tool_call", "tool_response", "environment", "context"}


@dataclass(frozen=True)
class Conversation:
    """Messages {"role", "content", ...}, of which the assistant's are learnt, but nothing of the first `given`."""

    messages: Messages
    tools: list[Any] | None = None  # for the template
    given: int = 0


@dataclass(frozen=True)
class Completion:
    """A prompt, and the text after it, which is learnt."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt."""

    chosen: Conversation | Completion
    rejected: Conversation | Completion


@dataclass(frozen=True)
class Pooled:
    """A text that is learnt as a whole, from the state of its last token: its class, by number or name, or, without one, its
    embedding.

    The tokens of such a document end with the number of the class, or with 0: the only label that counts.
    """

    text: str
    label: int | str | None = None


@dataclass(frozen=True)
class Match:
    """Two texts whose embeddings are to be close, and texts whose embeddings are to be far from the first."""

    query: Pooled
    positive: Pooled
    negatives: tuple[Pooled, ...] = ()


Part = str | Conversation | Completion | Pooled
Document = Part | PreferencePair | Match


def parts(document: Document) -> list[Part]:
    """Return the document, or those of a pair or match: what is tokenised separately."""
    if isinstance(document, PreferencePair):
        return [document.chosen, document.rejected]
    return [document.query, document.positive, *document.negatives] if isinstance(document, Match) else [document]


def kind_of(document: Document) -> str:
    """Return what a corpus of such documents holds."""
    if isinstance(document, Match):
        return matches_with(len(document.negatives))
    return {PreferencePair: "preferences", Pooled: "classes"}.get(type(document), "texts")


def matches_with(negatives: int) -> str:
    """Return the kind of matches with this number of negatives."""
    return f"{MATCHES} of {2 + negatives} texts" if negatives else MATCHES


def group_of(kind: str) -> int:
    """Return the number of consecutive documents that belong together in a corpus of this kind."""
    if kind.startswith(f"{MATCHES} of "):
        return int(kind.split()[2])
    return 2 if kind in ("preferences", MATCHES) else 1


def strings(document: Document) -> Iterator[str]:
    for part in parts(document):
        if isinstance(part, Conversation):
            yield from (message["content"] for message in part.messages)
        elif isinstance(part, Pooled):
            yield part.text
        else:
            yield from (part,) if isinstance(part, str) else (part.prompt, part.completion)


def serialized(document: Document) -> str:
    """Return a text that determines the document, for checksums."""
    if isinstance(document, str):
        return document
    plain = isinstance(document, Conversation) and not document.tools and not document.given
    return json.dumps(document.messages if plain else asdict(document), ensure_ascii=False)  # type: ignore[union-attr]


class RowFormat(NamedTuple):
    name: str
    keys: tuple[str, ...]  # that a row must have
    optional: tuple[str, ...]
    parse: Callable[[Mapping[str, Any], str], Document]
    named: bool = False  # taken only where `format` names it: its rows are also of another format


def text(row: Mapping[str, Any], where: str) -> Document:
    return _text_or_chat(row["text"], f"{where}['text']")


def messages(row: Mapping[str, Any], where: str) -> Document:
    return Conversation(as_messages(row["messages"], f"{where}['messages']"), as_tools(row, where))


def sharegpt(row: Mapping[str, Any], where: str) -> Document:
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    turns = as_messages(row["conversations"], f"{where}['conversations']")
    return Conversation(as_messages(system, f"{where}['system']") + turns if system else turns, as_tools(row, where))


def alpaca(row: Mapping[str, Any], where: str) -> Document:
    """Return a chat: the user's turn is the instruction and, in a new paragraph, the input; the output is the assistant's."""
    fields = {key: as_text(row.get(key) or "", f"{where}[{key!r}]") for key in ("system", "instruction", "input", "output")}
    if not fields["output"].strip():
        return ""
    question = "\n\n".join(filter(None, (fields["instruction"], fields["input"])))
    turns = {"system": fields["system"], "user": question, "assistant": fields["output"]}
    return Conversation([{"role": role, "content": content} for role, content in turns.items() if content or role == "user"])


def completion(row: Mapping[str, Any], where: str) -> Document:
    """Return a prompt and its completion, both texts, or one chat of both, lists of messages."""
    if isinstance(row.get("label"), bool):
        raise DataError(
            f"{where}: has 'label', a preference without its pair; wanted rows of 'prompt', 'chosen' and 'rejected', or the "
            f"prompts and completions that are to be learnt, without labels."
        )
    prompt, answer = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(answer, str):
        example = Completion(as_text(prompt, f"{where}['prompt']"), as_text(answer, f"{where}['completion']"))
        return example if answer.strip() else ""
    asked, answered = as_turns(prompt, "user", f"{where}['prompt']"), as_turns(answer, "assistant", f"{where}['completion']")
    return Conversation(asked + answered, as_tools(row, where), given=len(asked))


def preference(row: Mapping[str, Any], where: str) -> Document:
    """Return two answers to `prompt`. Without one, the prompt is what both texts or conversations begin with. Two equal answers
    have no preference."""
    if row["chosen"] == row["rejected"]:
        return ""
    prompt, answers = row.get("prompt"), {name: row[name] for name in ("chosen", "rejected")}
    if all(isinstance(part, str) for part in (prompt or "", *answers.values())):
        texts = [as_text(answer, f"{where}[{name!r}]") for name, answer in answers.items()]
        if prompt is None:
            common = texts[0][: _common(*texts)]
            prompt = common[: 1 + max(common.rfind(" "), common.rfind("\n"))]
            texts = [answer[len(prompt) :] for answer in texts]
        as_text(prompt, f"{where}['prompt']")
        return PreferencePair(*(Completion(prompt, answer) for answer in texts)) if all(map(str.strip, texts)) else ""
    chats = [as_turns(answer, "assistant", f"{where}[{name!r}]") for name, answer in answers.items()]
    if prompt is not None and any(chat[0]["role"] == "assistant" for chat in chats):  # else each has the prompt already
        asked = as_turns(prompt, "user", f"{where}['prompt']")
        chats = [asked + chat for chat in chats]
    given = _common(*chats)
    for name, chat in zip(answers, chats):
        if not given or not any(message["role"] == "assistant" for message in chat[given:]):
            raise DataError(
                f"{where}[{name!r}]: has no assistant's answer after the messages that both begin with, wanted one "
                f"prompt and two answers; leave the row out."
            )
    return PreferencePair(*(Conversation(chat, as_tools(row, where), given) for chat in chats))


def classification(row: Mapping[str, Any], where: str) -> Document:
    written, label = as_text(row["text"], f"{where}['text']"), row["label"]
    if not isinstance(label, int | str) or label == "" or (isinstance(label, int) and label < 0):
        raise DataError(
            f"{where}['label']: got {shown(label)}, wanted the number of a class, counted from 0, or one of the names that are "
            f"given as classes of objective_options."
        )
    return Pooled(written, label if isinstance(label, str) else int(label)) if written.strip() else ""


def matches(row: Mapping[str, Any], where: str, query: str = "query") -> Document:
    texts = [as_text(row[name], f"{where}[{name!r}]") for name in (query, "positive")]
    key = "negative" if row.get("negative") is not None else "negatives"
    negatives = [] if row.get(key) is None else row[key] if isinstance(row[key], list) else [row[key]]
    texts += [as_text(text, f"{where}[{key!r}]") for text in negatives]
    query_text, positive, *others = map(Pooled, texts)
    return Match(query_text, positive, tuple(others)) if all(map(str.strip, texts)) else ""


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


FORMATS = (
    RowFormat("text", ("text",), (), text),
    RowFormat("messages", ("messages",), ("tools",), messages),
    RowFormat("sharegpt", ("conversations",), ("system", "tools"), sharegpt),
    RowFormat("alpaca", ("instruction", "output"), ("system", "input"), alpaca),
    RowFormat("completion", ("prompt", "completion"), ("label", "tools"), completion),
    RowFormat("preference", ("chosen", "rejected"), ("prompt", "tools"), preference),
    RowFormat(MATCHES, ("query", "positive"), ("negative", "negatives"), matches),
    RowFormat(MATCHES, ("anchor", "positive"), ("negative", "negatives"), partial(matches, query="anchor")),
    RowFormat("classification", ("text", "label"), (), classification, named=True),
)


class RowParser:
    """Callable that returns the document in a row. Rows of one file have one format, which the first shows.

    text_key  the key that holds a text or a chat, instead of the formats' keys
    format    the name of the format, for rows with the keys of several
    mixed     rows may differ in format, as those that a program gives
    """

    def __init__(self, text_key: str | None = None, format: str | None = None, mixed: bool = False):
        self.text_key, self.mixed = text_key, mixed
        self.formats = tuple(known for known in FORMATS if known.name == format or (format is None and not known.named))
        if not self.formats:
            names = ", ".join(dict.fromkeys(known.name for known in FORMATS))
            raise ValueError(f"texts: format: got {format!r}, wanted one of {names}.")
        self.format: RowFormat | None = None
        self._noticed = False

    def columns(self, names: list[str], where: str) -> list[str]:
        """Return those of a table's columns that its format reads."""
        if self.text_key is not None:
            wanted = [self.text_key] if self.text_key in names else []
        else:
            matching = [known for known in self.formats if set(known.keys) <= set(names)]
            wanted = [key for known in matching for key in (*known.keys, *known.optional)]
        if not wanted:
            raise DataError(f"{where}: has the columns {', '.join(names)}, {self._wanted()}")
        return [name for name in names if name in wanted]

    def __call__(self, item: Any, where: str) -> Document:
        if not isinstance(item, Mapping):
            return _text_or_chat(item, where)
        if self.text_key is not None:
            if item.get(self.text_key) is None:
                raise DataError(f"{where}: {self._missing(item, (self.text_key,))}")
            return _text_or_chat(item[self.text_key], f"{where}[{self.text_key!r}]")
        format = self.format
        if format is None or any(item.get(key) is None for key in format.keys):
            format = self._detect(item, where)
            if self.format is not None:
                raise DataError(
                    f"{where}: is of the format {format.name}, the rows before it are of {self.format.name}; wanted one "
                    f"format in a file."
                )
            self.format = None if self.mixed else format
        return format.parse(item, where)

    def _detect(self, row: Mapping[str, Any], where: str) -> RowFormat:
        matching = [known for known in self.formats if all(row.get(key) is not None for key in known.keys)]
        if len(matching) > 1 and matching[0].name == "text":  # a chat written out: learning it would learn the prompts, too
            matching = matching[1:]
            if not self._noticed:
                notice(
                    f"{where}: its 'text' is not read, but its {', '.join(matching[0].keys)}; format or text_key names another."
                )
            self._noticed = True
        if len(matching) > 1:
            both = " and ".join(f"{known.name} ({', '.join(known.keys)})" for known in matching)
            raise DataError(f"{where}: has the keys of the formats {both}; name the one to learn with format (--format).")
        if not matching:
            raise DataError(f"{where}: {self._missing(row, [key for known in self.formats for key in known.keys])}")
        return matching[0]

    def _missing(self, row: Mapping[str, Any], keys: Iterable[str]) -> str:
        if null := [key for key in keys if key in row and row[key] is None]:
            wanted = "a class" if null[0] == "label" else "a text or a chat"
            return f"its {null[0]!r} is null, wanted {wanted}; leave the row out."
        more = f" and {len(row) - MAX_LISTED} more" if len(row) > MAX_LISTED else ""
        names = ", ".join(map(repr, list(row)[:MAX_LISTED])) + more
        return f"has {'the keys ' + names if row else 'no keys'}, {self._wanted()}"

    def _wanted(self) -> str:
        if self.text_key is not None:
            return f"wanted {self.text_key!r}; name another with text_key (--text-key)."
        keys = [" with ".join(map(repr, known.keys)) for known in self.formats]
        wanted = f"{', '.join(keys[:-1])} or {keys[-1]}" if keys[1:] else f"{keys[0]}, by its format {self.formats[0].name!r}"
        return f"wanted {wanted}; name the key of a text or chat with text_key (--text-key)."


def _text_or_chat(item: Any, where: str) -> Document:
    if isinstance(item, str):
        return as_text(item, where)
    return Conversation(as_messages(item, where))


def as_text(item: Any, where: str) -> str:
    if not isinstance(item, str):
        raise DataError(f"{where}: got {shown(item)}, wanted a text; leave the row out, or write one.")
    try:
        item.encode()
    except UnicodeEncodeError as error:  # JSON can write "\ud800", half of a character
        raise DataError(
            f"{where}: holds half a surrogate pair (U+{ord(item[error.start]):04X} at character {error.start}), which no "
            f"tokenizer takes; remove it or write the whole character."
        ) from error
    return item


def as_turns(item: Any, role: str, where: str) -> Messages:
    """Return messages; a text is one of this role."""
    return [{"role": role, "content": as_text(item, where)}] if isinstance(item, str) else as_messages(item, where)


def as_messages(item: Any, where: str) -> Messages:
    if not isinstance(item, list | tuple) or not item or not all(isinstance(message, Mapping) for message in item):
        got = "an empty list" if isinstance(item, list | tuple) and not item else f"a {type(item).__name__}"
        raise DataError(f"{where}: got {got}, wanted a string or a chat [{{'role': ..., 'content': ...}}, ...].")
    return [_message(message, f"{where}[{number}]") for number, message in enumerate(item)]


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message with a text as its content, without the fields that are null, as tables have them."""
    message = {key: value for key, value in item.items() if value is not None}
    if "from" in message and "role" not in message:  # ShareGPT
        role = message.pop("from")
        if not isinstance(role, str) or role not in ROLES:
            raise DataError(f"{where}: from: got {shown(role)}, wanted one of {', '.join(ROLES)}.")
        message |= {"role": ROLES[role], "content": message.pop("value", None)}
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(part, str) for part in texts):
            content = "".join(texts)
    if content is None and calls:
        content = ""
    for key, value, wanted in (
        ("role", message.get("role"), "a text such as 'user' or 'assistant'"),
        ("content", content, "a text, or parts {'type': 'text', 'text': ...}; leave the row out, or write one"),
    ):
        if not isinstance(value, str):
            raise DataError(f"{where}: {key}: got {shown(value)}, wanted {wanted}.")
        as_text(value, where)
    role = message["role"]
    if role not in KNOWN_ROLES and (close := get_close_matches(role.lower(), sorted(KNOWN_ROLES), n=1, cutoff=0.8)):
        raise DataError(f"{where}: role: got {role!r}, wanted {close[0]!r} if that is meant: what it says would not be learnt.")
    message["content"] = content
    if type(weight := message.get("weight", 1)) not in (int, float) or weight not in (0, 1):
        raise DataError(f"{where}: weight: got {shown(weight)}, wanted 1, or 0 for a message that is not learnt.")
    if calls:
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    for key in message.keys() - {"role", "content"}:
        _check_nested(message[key], where)
    return message


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, as templates expect; OpenAI writes them as JSON in a string."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: tool_calls: got {shown(call)}, wanted {{'function': {{'name': ..., 'arguments': ...}}}}.")
    arguments = function.get("arguments") or {}
    arguments = _from_json(arguments, f"{where}: arguments") if isinstance(arguments, str) else arguments
    return {"type": "function"} | dict(call) | {"function": {"name": function["name"], "arguments": arguments}}


def as_tools(row: Mapping[str, Any], where: str) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str):  # in a table's column
        tools = _from_json(tools, f"{where}['tools']") if tools.strip() else None
    if tools and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        raise DataError(f"{where}['tools']: got {shown(tools)}, wanted a list of functions' descriptions.")
    _check_nested(tools, f"{where}['tools']")
    return list(tools) if tools else None


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON ({error}); fix the row, or leave it out.") from error


def _check_nested(value: Any, where: str) -> None:
    """Raise DataError for a value that a template could not write."""
    if _is_deeper(value, MAX_DEPTH):
        raise DataError(f"{where}: is nested more than {MAX_DEPTH} deep; leave the field out.")
    as_text(json.dumps(value, ensure_ascii=False, default=str), where)


def _is_deeper(value: Any, depth: int) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, list | tuple) and (depth == 0 or any(_is_deeper(inner, depth - 1) for inner in value))
