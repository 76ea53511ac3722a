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
from itertools import pairwise
from os.path import commonprefix

from configurator import InputError, reading

# Marks where a text is cut before it is encoded: characters of Unicode's private use area that nobody writes
# in this order.
CUT = "\ue000\uf8ff\ue001\uf8fe"
# A template is tried with a turn of the policy that has a thought. The keys are the tags with which templates
# end a thought. With tools, Gemma 4's template writes what a turn says after the result of its call, and what
# it thinks before the call.
THOUGHTFUL = {"</think>": {"content": "<think>\nwhy\n</think>\n\nbecause"},
              "<channel|>": {"content": "<|channel>thought\nwhy\n<channel|>because"}}
THOUGHTFUL_WITH_TOOLS = THOUGHTFUL | {"<channel|>": {"content": "", "reasoning_content": "why"}}
# A response template, for tokenizers that have none: how Qwen and many other models write thoughts and calls.
# It reads from a thought that the prompt has begun, or else from the end of the prompt. A thought or a call
# that is not closed reaches to the end.
COMMON = {"start_anchor_pattern": r"\A.*?(?=(<think>\s*)?\Z)", "fields": {
    "reasoning_content": {"open": "<think>", "close": "</think>", "repeats": True, "join": "\n"},
    "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True,
                   "transform": {"function": "{content}"}},
    "content": {"repeats": True, "join": "\n"}}}


class Template:
    """A tokenizer's chat template for conversations with these tools.

    eos_ids       the tokens that end a turn
    tools         JSON schemas, or None if there are no tools
    tool_names    the names of the tools
    control_ids   the tokens that no text may spell, because they control the conversation
    sample_turn   a turn of the policy with which the template is tried, without calls
    """

    def __init__(self, tokenizer, eos_ids, tools):
        self.tokenizer = tokenizer
        self.eos_ids = set(eos_ids)
        self.tools = tools
        self.tool_names = [tool["function"]["name"] for tool in tools or ()]
        # Tokenizers also add runs of spaces and line ends, which control nothing.
        self.control_ids = {token for text, token in tokenizer.get_added_vocab().items()
                            if len(text.strip()) > 1}
        self.sample_turn = {"content": "because"}
        question = tokenizer.decode(self.opening([{"role": "user", "content": "?"}]))
        if not question.rstrip().endswith("</think>"):      # otherwise the policy is not to think
            turns = THOUGHTFUL_WITH_TOOLS if tools else THOUGHTFUL
            for tag, turn in turns.items():
                if tag in str(tokenizer.chat_template):
                    self.sample_turn = turn

    def opening(self, messages, ask=True):
        """Return the ids of messages and, with ask, of what stands before the policy's turn."""
        with reading(f"with the chat template {messages!r:.500}"):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask,
                                                      tools=self.tools)
        # The texts before and after a CUT are encoded one by one, and some tokenizers put a space between.
        return sum(self.tokenizer(text.split(CUT), add_special_tokens=False).input_ids, [])

    def between(self, turn, reply, ended=True):
        """Return the ids after the end token of a turn, up to where the next turn begins.

        turn: a message, of which only ids and names of its tool calls matter. reply: the messages that follow
        it. The result of a call gets the name of the tool that was called. ended: whether the turn has its
        end token; if not, the ids begin with it.
        """
        names = {}                                          # {id of a call: name}
        for call in turn.get("tool_calls", ()):
            name = call["function"]["name"]
            # The policy may have made up a name, and with it a control token.
            names[call["id"]] = name if name in self.tool_names else "unknown"
        messages, question, sampled = self._until_end(tuple(names.values()))
        for message in reply:
            message = self.defused_message(message)
            if message.get("tool_call_id") in names:
                message["name"] = names[message["tool_call_id"]]
            messages = [*messages, message]
        before = question + sampled
        after = self.opening(messages)
        self._expect(before, after[:len(before)])
        return after[len(before) - (not ended):]

    def read(self, before, sampled, text):
        """Return a turn as a message without its calls, and a list with its calls.

        A call is a pair: the call as transformers writes it, and what is wrong with it, or "".
        before: the ids before the turn. sampled, text: ids and text of the turn; if it has no end token, both
        are its text.
        """
        message = {"role": "assistant", "content": text}
        response_template = getattr(self.tokenizer, "response_template", None)
        if not (response_template or self.tools):
            return message, []
        if not response_template:
            response_template = COMMON
            sampled = text
            before = before[-99:]                           # the end says whether a thought has begun
        try:
            parsed = self.tokenizer.parse_response(sampled, response_template, prefix=before,
                                                   tools=self.tools)
            functions = [call["function"] for call in parsed.pop("tool_calls", None) or ()]
            message |= parsed | {"content": parsed.get("content") or ""}
        # A parser may raise anything for text that is not as it expects.
        except Exception as error:
            return message, [(tool_call(0, "unknown", {}), f"this is no call of a tool: {error!r}")]
        return message, [read_call(self.tool_names, i, function) for i, function in enumerate(functions)]

    def defused(self, value):
        """Return a text, or a value of JSON, with a CUT inside all that is encoded as a control token."""
        return broken_up(value, self.tokenizer, self.control_ids, CUT)

    def defused_message(self, message):
        """Return a message with a CUT inside all control tokens, also those in its tool calls.

        Its content becomes text.
        """
        message = message | {"content": self.defused(text_in(message["content"]))}
        calls = message.get("tool_calls")
        if calls:
            message["tool_calls"] = [call | {"function": self.defused(call["function"])} for call in calls]
        return message

    def check(self, messages):
        """Raise InputError if the template cannot be used for several turns after these messages."""
        names = self.tool_names[:1]
        opening = self.opening(messages)
        reply = {"role": "user", "content": "forty-two"}
        if names:
            if opening == Template(self.tokenizer, self.eos_ids, None).opening(messages):
                raise InputError("the chat template has no place for tools")
            reply |= {"role": "tool", "name": names[0], "tool_call_id": call_id(0)}
        turn = turn_of(self.sample_turn, names)
        _, question, sampled = self._until_end(tuple(names))
        inserted = self.between(turn, [reply])
        # Of two turns, the first is rewritten if the template rewrites earlier turns. Both have to stay as
        # each would be alone.
        one_turn = sampled + inserted
        two_turns = self.opening([*messages, turn, reply, turn, reply])
        self._expect(opening + one_turn, two_turns[:len(opening + one_turn)])
        self._expect(one_turn, two_turns[-len(one_turn):])
        text = self.tokenizer.decode(sampled[:-1])
        if "why" in str(turn) and "why" not in text:
            raise InputError(f"the chat template drops what a turn has thought: it writes {text!r:.200} for "
                             f"{turn['content']!r}")
        if reply["content"] not in self.tokenizer.decode(inserted):
            raise InputError(f"the chat template has no place for a message of the role {reply['role']}")
        if names:
            # The policy may make up a tool, and make several calls at once.
            self.between(turn_of({}, ["unknown", *names]), [reply] * 2)
            _, calls = self.read(question, sampled, text)
            if [call["function"]["name"] for call, _ in calls] != names:
                raise InputError(f"no call is found in {text!r:.300}, which the chat template writes: it "
                                 "needs the form <tool_call>JSON</tool_call>, or a response_template")

    @functools.lru_cache(maxsize=64)
    def _until_end(self, names):
        """Return a question and a turn that calls these tools, as messages and as ids.

        The ids are those of the question, up to where the turn begins, and those of the turn up to its end
        token, which is included.
        """
        messages = [{"role": "user", "content": "?"}, turn_of(self.sample_turn, names)]
        begin = len(self.opening(messages[:1]))
        try:
            ids = self.opening(messages, ask=False)
        except ValueError:
            if len(names) < 2:
                raise
            # Llama's template refuses several calls. Their results follow a turn with the first, as in TRL.
            return self._until_end(names[:1])
        # The question itself may begin with a token that ends a turn.
        ends = [end for end in range(begin + 1, len(ids) + 1) if ids[end - 1] in self.eos_ids]
        if not ends:
            raise InputError("the chat template ends a turn with none of the tokens that end a completion: "
                             f"{self.tokenizer.convert_ids_to_tokens(sorted(self.eos_ids))}")
        return messages, ids[:begin], ids[begin:ends[-1]]

    def _expect(self, before, after):
        """Raise InputError unless these ids are the same."""
        if before != after:
            before, after = self.tokenizer.batch_decode([before, after])
            start = max(0, len(commonprefix([before, after])) - 40)
            raise InputError("the chat template rewrites earlier turns, so the tokens of an episode would "
                             f"not be those of its conversation: {before[start:start + 120]!r} becomes "
                             f"{after[start:start + 120]!r}")


def broken_up(value, tokenizer, control_ids, mark):
    """Return the value with a mark inside everything in it that is encoded as one of control_ids.

    The value is a text, or a value of JSON, in which all texts and keys are broken up. A single character
    stays as it is, and half a surrogate pair becomes a question mark.
    """
    broken = functools.partial(broken_up, tokenizer=tokenizer, control_ids=control_ids, mark=mark)
    if isinstance(value, list):
        return [*map(broken, value)]
    if isinstance(value, dict):
        return {broken(key): broken(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    text = value.encode(errors="replace").decode()
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # A tokenizer that normalises makes a control token of other characters as well, so the offsets count.
    cuts = [(start + end) // 2 for token, (start, end) in zip(encoded.input_ids, encoded.offset_mapping)
            if token in control_ids and end - start > 1]
    if not cuts:
        return text
    # Where two control tokens overlap, the second shows only when the first is broken up.
    return mark.join([broken(text[start:end]) for start, end in pairwise([0, *cuts, None])])


def result_of(value):
    """Return what a tool returned as the content of a message, for the policy and for rewards.

    A list or an object stays one, with values that JSON has. What a client of an MCP server returns becomes
    the list of its blocks. Anything else becomes text.
    """
    if isinstance(getattr(value, "content", None), list):
        value = value.content
    if isinstance(value, (list, dict)):
        # What is nested so deeply that others could not copy it becomes text as well.
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            return deepcopy(json.loads(json.dumps(value, default=fields_or_text)))
    return str(value)


def fields_or_text(value):
    # Returns a block of text as a dict, and any other object as text.
    if getattr(value, "type", "") == "text":
        return vars(value)
    return str(value)


def text_in(content):
    """Return the content of a message as the policy reads it: blocks of text are joined, as in TRL.

    A dict with which an MCP server answers has its blocks in "content".
    """
    blocks = content
    if isinstance(content, dict):
        blocks = content.get("content")
    text = text_of_blocks(blocks)
    return str(content) if text is None else text


def text_of_blocks(blocks):
    """Return the text of a list of blocks of text, or None for anything else."""
    with contextlib.suppress(TypeError, KeyError):              # they have another form
        if {block["type"] for block in blocks} == {"text"}:
            return "".join(str(block["text"]) for block in blocks)


def call_id(number):
    """Return the id of a turn's call, which counts from 0. Some templates want nine letters or digits."""
    return f"call{number:05}"


def tool_call(number, name, arguments):
    """Return a turn's tool call as transformers writes it in a message; number: its place in the turn."""
    return {"id": call_id(number), "type": "function", "function": {"name": name, "arguments": arguments}}


def read_call(tool_names, number, function):
    """Return a call as transformers writes it, and what is wrong with it, or "".

    number: its place in the turn. function: {"name": ..., "arguments": ...}, or this as JSON. Llama's models
    write "parameters" instead, and the tool must not be called without them.
    """
    name = "unknown"
    arguments = {}
    problem = ""
    try:
        if isinstance(function, str):
            function = json.loads(function)
        name = str(function["name"])
        value = function.get("arguments") or function.get("parameters") or {}
        if isinstance(value, str):
            value = json.loads(value)
        # Arguments that are nested so deeply that others could not copy or send them are refused.
        deepcopy(functools.reduce(lambda inside, _: [inside], range(200), value))
        if isinstance(value, dict):
            arguments = value
        else:
            problem = "the arguments are no object"
        if name not in tool_names:
            problem = f"there is no tool {name}; there are {', '.join(tool_names)}"
    except Exception as error:
        problem = f"this is no call of a tool: {error!r}"
    return tool_call(number, name, arguments), problem


def turn_of(message, names):
    """Return a turn of the policy with what stands in the message, and with calls of these tools."""
    turn = {"role": "assistant", "content": ""} | message
    if names:
        turn["tool_calls"] = [tool_call(number, name, {}) for number, name in enumerate(names)]
    return turn
