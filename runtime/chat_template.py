"""
The chat template between the turns of an episode, as exact tokens, and the turns themselves as messages.

What the policy sampled stays as it was sampled. What stands between two of its turns (the end of a line, the
environment's message, the beginning of the next turn) is the difference of two renderings of a short
conversation, one with the message and one without it. Nothing is encoded twice, so no token can change. That
is right only for templates that never rewrite earlier turns; check() refuses the others.
"""
import contextlib
import functools
import json
from copy import deepcopy
from os.path import commonprefix

from runtime.check_model import reading

# Marks where a text is cut before it is encoded: characters of Unicode's private use area that nobody writes
# in this order.
CUT = "\ue000\uf8ff\ue001\uf8fe"
# What to try a template with, by the tag with which it ends a thought. With tools, Gemma 4's template writes
# what a turn says after the result of its call, and its thinking before the call.
THOUGHTFUL = {"</think>": {"content": "<think>\nwhy\n</think>\n\nbecause"},
              "<channel|>": {"content": "<|channel>thought\nwhy\n<channel|>because"}}
WITH_TOOLS = {"<channel|>": {"content": "", "reasoning_content": "why"}}
# How Qwen and many other models write thoughts and calls: a response template for tokenizers that have none.
# It is read from a thought that the prompt has begun, or else from the end of the prompt. What is not closed
# reaches to the end.
COMMON = {"start_anchor_pattern": r"\A.*?(?=(<think>\s*)?\Z)", "fields": {
    "reasoning_content": {"open": "<think>", "close": "</think>", "repeats": True, "join": "\n"},
    "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True,
                   "transform": {"function": "{content}"}},
    "content": {"repeats": True, "join": "\n"}}}


class Template:
    """A tokenizer's chat template for conversations with these tools (JSON schemas, or None for none).

    eos_ids: the tokens that end a turn.
    """

    def __init__(self, tokenizer, eos_ids, tools):
        self.tokenizer, self.eos_ids, self.tools = tokenizer, set(eos_ids), tools
        self.names = [tool["function"]["name"] for tool in tools or ()]
        # Tokenizers also add runs of spaces and line ends, which control nothing.
        self.control = {one for text, one in tokenizer.get_added_vocab().items() if len(text.strip()) > 1}
        # Where the template itself ends the thinking before a turn, the policy does not think.
        asked = tokenizer.decode(self.opening([{"role": "user", "content": "?"}])).rstrip()
        tried = {} if asked.endswith("</think>") else THOUGHTFUL | (WITH_TOOLS if tools else {})
        self.turn = next((turn for tag, turn in tried.items() if tag in str(tokenizer.chat_template)),
                         {"content": "because"})

    def opening(self, messages, asked=True):
        """Return the ids of messages and, if the policy is asked for a turn, of what stands before it."""
        with reading(f"with the chat template {messages!r:.500}"):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asked,
                                                      tools=self.tools)
        # The texts before and after a CUT are encoded one by one, so some tokenizers put a space between them.
        return sum(self.tokenizer(text.split(CUT), add_special_tokens=False).input_ids, [])

    def between(self, turn, reply):
        """Return the ids after the end token of a turn, up to where the next turn begins.

        turn: a message, of which only ids and names of its tool calls matter. reply: the messages that follow
        it. A result of a call gets the call's name.
        """
        calls = {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", [])}
        # The policy may have made up a name, and with it a control token.
        names = [name if name in self.names else "unknown" for name in calls.values()]
        messages, asked, said = self._until_end((*names,))
        before = asked + said
        called = {key: {"name": name} for key, name in zip(calls, names)}
        reply = [message | {"content": self.defused(text_in(message["content"]))}
                 | called.get(message.get("tool_call_id"), {}) for message in reply]
        after = self.opening(messages + reply)
        self._expect(before, after[:len(before)])
        return after[len(before):]

    def read(self, before, sampled, text):
        """Return a turn as a message, and its calls: each as transformers writes it, with its problem, or "".

        before: the ids before the turn. sampled, text: ids and text of the turn.
        """
        said, own = {"role": "assistant", "content": text}, getattr(self.tokenizer, "response_template", None)
        if not (own or self.tools):
            return said, []
        turn, form, prompt = (sampled, own, before) if own else (text, COMMON, before[-99:])
        try:
            parsed = self.tokenizer.parse_response(turn, form, prefix=prompt, tools=self.tools)
            found = [call["function"] for call in parsed.pop("tool_calls", None) or []]
            said |= parsed | {"content": parsed.get("content") or ""}
        # A parser may raise anything for text that is not as it expects.
        except Exception as error:
            return said, [(tool_call(0, "unknown", {}), f"this is no call of a tool: {error!r}")]
        return said, [read_call(self.names, number, one) for number, one in enumerate(found)]

    def defused(self, text):
        """Return the text with a CUT inside everything in it that is encoded as a control token."""
        return broken_up(text, self.tokenizer, self.control, CUT)

    def check(self, messages):
        """Raise ValueError if the template cannot be used for several turns after these messages."""
        reply, calls = {"role": "user", "content": "forty-two"}, self.names[:1]
        if calls:
            if self.opening(messages) == Template(self.tokenizer, self.eos_ids, None).opening(messages):
                raise ValueError("the chat template has no place for tools")
            reply |= {"role": "tool", "name": calls[0], "tool_call_id": tool_call(0, "", {})["id"]}
        turn, (_, question, said) = turn_of(self.turn, calls), self._until_end((*calls,))
        again = said + (inserted := self.between(turn, [reply]))
        # The first of two turns, which is an earlier one then, and the second stay as each would be alone.
        first, whole = self.opening(messages) + again, self.opening([*messages, turn, reply, turn, reply])
        self._expect(first, whole[:len(first)])
        self._expect(again, whole[-len(again):])
        text = self.tokenizer.decode(said[:-1])
        if "why" in str(turn) and "why" not in text:
            raise ValueError(f"the chat template drops what a turn has thought: it writes {text!r:.200} for "
                             f"{turn['content']!r}")
        if reply["content"] not in self.tokenizer.decode(inserted):
            raise ValueError(f"the chat template has no place for a message of the role {reply['role']}")
        if calls:
            # The policy may make up a tool, and make several calls at once.
            self.between(turn_of({}, ["unknown", *calls]), [reply] * 2)
            if [call["function"]["name"] for call, _ in self.read(question, said, text)[1]] != calls:
                raise ValueError(f"no call is found in {text!r:.300}, which the chat template writes: it "
                                 "needs the form <tool_call>JSON</tool_call>, or a response_template")

    @functools.lru_cache(maxsize=64)
    def _until_end(self, calls):
        # A question and a turn with calls of these tools: the messages, the ids of the question, and the
        # others to the end of the turn.
        messages = [{"role": "user", "content": "?"}, turn_of(self.turn, calls)]
        begin = len(self.opening(messages[:1]))
        try:
            ids = self.opening(messages, asked=False)
        except ValueError:
            if len(calls) < 2:
                raise
            # Llama's template refuses several calls. Their results follow a turn with the first, as in TRL.
            return self._until_end(calls[:1])
        # The token that begins a question may be one of the tokens that end a turn.
        ends = [place for place in range(begin, len(ids)) if ids[place] in self.eos_ids]
        if not ends:
            raise ValueError("the chat template ends a turn with none of the tokens that end a completion: "
                             f"{self.tokenizer.convert_ids_to_tokens(sorted(self.eos_ids))}")
        return messages, ids[:begin], ids[begin:ends[-1] + 1]

    def _expect(self, before, after):
        # Raises ValueError unless these ids are the same.
        if before != after:
            before, after = self.tokenizer.batch_decode([before, after])
            start = max(0, len(commonprefix([before, after])) - 40)
            raise ValueError("the chat template rewrites earlier turns, so the tokens of an episode would "
                             f"not be those of its conversation: {before[start:start + 120]!r} becomes "
                             f"{after[start:start + 120]!r}")


def broken_up(text, tokenizer, control, mark):
    """Return the text with a mark inside everything in it that is encoded as one of the ids `control`.

    What has a single character stays, and half a surrogate pair becomes a question mark.
    """
    text = text.encode(errors="replace").decode()
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # A tokenizer that normalises makes a control token of other characters as well.
    cuts = [(start + end) // 2 for one, (start, end) in zip(found.input_ids, found.offset_mapping)
            if one in control and end - start > 1]
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, None])]
    # Two that overlap take two rounds.
    return mark.join(broken_up(part, tokenizer, control, mark) for part in parts) if cuts else text


def result_of(value):
    """Return what a tool returned as the content of a message: a list or an object in values that JSON has,
    for rewards, and anything else as text."""
    if isinstance(value, (list, dict)):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            return deepcopy(json.loads(json.dumps(value, default=str)))
    return str(value)


def text_in(content):
    """Return the content of a message as the policy reads it: blocks of text are joined, as in TRL."""
    if isinstance(content, list) and content and all(
            isinstance(one, dict) and one.get("type") == "text" and "text" in one for one in content):
        return "".join(str(one["text"]) for one in content)
    return str(content)


def tool_call(number, name, arguments):
    """Return a turn's tool call as transformers writes it in a message; number: its place in the turn."""
    # Some templates want an id of nine letters or digits.
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def read_call(tools, number, found):
    """Return a call as transformers writes it, and its problem, or "".

    tools: names. number: its place in the turn. found: {"name": ..., "arguments": ...}, or this as JSON.
    """
    name, arguments, problem = "unknown", {}, ""
    try:
        found = json.loads(found) if isinstance(found, str) else found
        name, given = str(found["name"]), found.get("arguments") or {}
        given = json.loads(given) if isinstance(given, str) else given
        # What is nested so deeply that others could not copy or send it is refused.
        deepcopy(functools.reduce(lambda inside, _: [inside], range(200), given))
        arguments, problem = (given, "") if isinstance(given, dict) else ({}, "the arguments are no object")
        if name not in tools:
            problem = f"there is no tool {name}; there are {', '.join(tools)}"
    except Exception as error:
        problem = f"this is no call of a tool: {error!r}"
    return tool_call(number, name, arguments), problem


def turn_of(said, names):
    # A turn of the policy that says this and calls these tools.
    calls = [tool_call(number, name, {}) for number, name in enumerate(names)]
    return {"role": "assistant", "content": ""} | said | ({"tool_calls": calls} if calls else {})
