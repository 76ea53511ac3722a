"""
Agents: programs that play episodes by asking the policy, through an OpenAI-compatible endpoint on 127.0.0.1.

    async def solve(base_url, api_key, row):    # --agent=my_agent.py:solve; a plain def will do as well
        ...                                     # it asks as often as it likes
        return 1.0                              # the score: a number, None, or a dict of parts

The process whose engine steps serves the endpoint in a thread and answers the requests of all episodes
together; the key says which episode speaks. A request whose messages continue an earlier one of its episode,
with the answer as it was returned, continues that sequence of tokens, where all that was sampled stays as it
was. Any other request begins a sequence of its own. All sequences are trained, except for those of the model
"opponent", which is the policy as another sampler.

Two threads meet in an AgentSession. The endpoint's thread puts requests into its `mail` and waits for their
Futures. The thread that drives the engine takes them out one after the other and answers them.
"""
import asyncio
import contextlib
import copy
import json
import socket
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from queue import SimpleQueue
from secrets import token_hex
from threading import Thread
from typing import NamedTuple

from aiohttp import web

from options.conversation import Conversation
from options.chat_template import Template, call_id, read_call, tool_call
from options.user_code import Failed, TimeUp, outcome, shown

# {a role of OpenAI's messages: what chat templates call it}
TEMPLATE_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant",
                  "tool": "tool"}
# The policy is sampled as it is, so these fields of a request can have no other values.
FIXED_FIELDS = {"n": (None, 1), "response_format": (None, {"type": "text"}), "tool_choice": (None, "auto")}
READ_FIELDS = {"messages", "tools", "model", "stream", "stream_options", "parallel_tool_calls", *FIXED_FIELDS}

SESSIONS = {}                           # {key: AgentSession} of the episodes that are being played
print_once = cache(print)               # prints the same words only once


# ------------------------------------------------------------------------------------------------------------
# the endpoint


@cache
def start():
    """Begin to listen to the agents of all episodes, once, and return the base URL."""
    app = web.Application(client_max_size=2**22)                # bytes of a request
    app.add_routes([web.post("/v1/chat/completions", handle)])
    listener = socket.create_server(("127.0.0.1", 0))
    # If a client leaves, its `handle` is cancelled.
    run = partial(web.run_app, app, sock=listener, print=None, access_log=None, handle_signals=False,
                  handler_cancellation=True)
    Thread(target=run, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


async def handle(request):
    """Hand a request to the session of its key, and wait for the answer."""
    key = request.headers.get("Authorization", "").removeprefix("Bearer ")
    session = SESSIONS.get(key)
    if session:
        # A request is read only if it has a key, because it takes memory.
        question = Question(Future(), await request.read())
        session.mail.put(question)
        # A session that closes from here on finds the question. One that has closed may have missed it.
        if key in SESSIONS:
            return await asyncio.wrap_future(question.future)
    return refusal(401, "this key belongs to no episode that is being played")


def refusal(status, text):
    """Return the response with an error, as OpenAI writes it."""
    return web.json_response({"error": {"message": text, "type": "invalid_request_error"}}, status=status)


class Question(NamedTuple):
    """A request of an agent: its bytes, and the Future that gets the response."""
    future: Future
    body: bytes

    def respond(self, response):
        """Hand the response to the endpoint's thread, if it still waits for one."""
        with contextlib.suppress(InvalidStateError):            # the client has left
            self.future.set_result(response)


# ------------------------------------------------------------------------------------------------------------
# the agent of one episode


@dataclass
class AgentSequence:
    """A sequence of tokens, from its prompt to one of the answers in it."""
    conversation: Conversation
    messages: list              # the messages of the prompt, the turns and the replies, as in for_template
    name: str                   # the model that its requests ask for; "opponent" is not trained
    continues: object           # the AgentSequence with which it begins, or None if it begins with its prompt
    continued: bool = False     # whether a later sequence continues this one
    full: bool = False          # whether its last answer was cut off, or what should follow it had no room
    answer: object = None       # the Answer at its end, which _join takes


class AgentSession:
    """What an agent asks in one episode. Its requests are answered one after the other, as they come.

    episode      the episodes.Episode; the session sets its row, conversation, finish_reason and asking
    key          the key that the agent shows
    mail         Questions that are not answered, and at the end what user_code.outcome returned for the agent
    longest      how many tokens may precede the first answer of a sequence
    answers      how many answers were sampled, also those whose clients had left
    sequences    an AgentSequence for each answered request
    sampled      how many tokens were sampled, also those of the opponent
    refused      why the last refused request was refused
    score        what the agent returned, which rewards.Scorer reads
    """
    answers = 0
    sampled = 0
    refused = ""
    score = None

    def __init__(self, episode):
        self.episode = episode
        self.key = token_hex()
        self.mail = SimpleQueue()
        self.longest = max(episode.sampler.settings.max_prompt_length, len(episode.conversation.ids))
        self.sequences = []

    def play(self):
        """Answer the agent's requests until it returns; a generator like Episode.play.

        Raises Failed or TimeUp if the agent fails.
        """
        episode = self.episode
        mail = self.mail
        solve = partial(episode.sampler.make, start(), self.key, copy.deepcopy(episode.row))
        timeout = episode.sampler.settings.call_timeout
        SESSIONS[self.key] = self
        # This thread may never end. It holds the mail and not the session, so that the session can be freed.
        Thread(target=lambda: mail.put(outcome(solve)), daemon=True).start()
        try:
            while True:
                item = yield from episode.call(mail.get, timeout=timeout or None)
                if not isinstance(item, Question):              # the agent has ended
                    break
                if not item.future.cancelled():
                    response = yield from self._response(item)
                    item.respond(response)
        except (Failed, TimeUp) as error:
            raise Failed(f"took more than call_timeout={timeout:g} seconds") from error
        finally:
            self._close()
            self._join()
        self.score, error, _ = item
        if not (error or episode.conversation.spans):
            error = Failed("never asked the policy, or did not wait for an answer")
        if error and self.refused:
            raise Failed(f"{error}; its last refused request: {self.refused}") from error
        if error:
            raise error

    def _close(self):
        """Listen to the agent no longer, and refuse what it has asked."""
        # In this order, because the endpoint's thread may be about to put a question: see `handle`.
        del SESSIONS[self.key]
        self.mail.put(self.episode.asking)                      # a Question only if the episode is aborted
        while not self.mail.empty():
            item = self.mail.get()
            if isinstance(item, Question):
                item.respond(refusal(401, "the episode of this key has ended"))

    def _response(self, question):
        """Answer a question, and return the response, or None if nobody waits for it any more."""
        try:
            body = json.loads(question.body)
            check_fields(body)
            sequence = self._sequence_for(body)
            self.episode.asking = question
            # The number of the turn counts the answers in all sequences, so that no two have the same seed.
            answer = yield sequence.conversation.request(self.answers + 1)
            self.episode.asking = None
            self.answers += 1
            # From this call on the client cannot take its request back. False says that it has done so.
            if not question.future.set_running_or_notify_cancel():
                return None
            message = self._add_answer(sequence, answer)
            return response_with(self, sequence, message, answer.finish_reason, body.get("stream"))
        # An agent may send anything.
        except Exception as error:
            self.refused = shown(error)
            return refusal(400, self.refused)

    def _sequence_for(self, body):
        """Return an AgentSequence of a request's messages, up to where the policy speaks.

        It continues an earlier sequence, or begins a new one. Raises ValueError if there is no room for an
        answer.
        """
        first = self.episode.conversation.first
        template = template_for(self.episode.sampler, tools_of(body))
        messages = for_template(body["messages"])
        name = str(body.get("model") or "")
        earlier = self._earlier_sequence(messages, template.tools, name)
        if earlier:
            conversation = copy.copy(earlier.conversation)
            fits = conversation.add_reply(messages[len(earlier.messages):])
        else:
            ids = template.opening([defused(message, template) for message in messages])
            conversation = Conversation(first._replace(ids=ids), template)
            fits = len(ids) <= self.longest
        if not fits:
            if earlier:
                earlier.full = True
            raise ValueError(f"the maximum context length is {self.longest} + {first.max_tokens} tokens")
        return AgentSequence(conversation, messages, name, earlier)

    def _earlier_sequence(self, messages, tools, name):
        """Return the longest sequence of this name that these messages continue, or None."""
        earlier = None
        length = 0
        # The newest sequence comes first. Most often it is the longest, and no other has to be compared.
        for sequence in reversed(self.sequences):
            known = sequence.messages
            if len(known) >= length and known == messages[:len(known)] and (
                    sequence.name == name and sequence.conversation.template.tools == tools):
                earlier = sequence
                length = len(known)
        return earlier

    def _add_answer(self, sequence, answer):
        """Append an answer to its sequence, keep that, count the answer, and return it as a message."""
        counts = self.episode.counts
        conversation = sequence.conversation
        text, message, calls = self.episode.sampler.read_turn(conversation, answer)
        problems = [problem for _, problem in calls if problem]
        counts["calls"] += len(problems or calls)
        counts["failures"] += len(problems)
        if problems:                            # a turn with a call that cannot be made stays a text
            message = {"role": "assistant", "content": text}
        elif calls:
            message["tool_calls"] = [call for call, _ in calls]
        conversation.add_turn(answer, message)
        sequence.answer = answer
        sequence.full = answer.finish_reason == "length"
        sequence.messages = sequence.messages + for_template([message])
        self.sequences.append(sequence)
        if sequence.continues:
            sequence.continues.continued = True
        self.sampled += len(answer.ids)
        return message

    def _join(self):
        """Join all sequences of the policy in the episode's conversation, in the order of their last answers.

        The messages and the prompt are those of the sequence with the most sampled tokens. If several begin
        with the same turns, these were sampled only once. They are turns of the first of these, and
        inserted tokens of the others. The episode was cut off if any of the sequences was.
        """
        episode = self.episode
        episode.finish_reason = "stop"
        longest = episode.conversation          # nothing was sampled in it
        joined = Conversation(longest.first._replace(ids=[]))
        joined.sequence_starts = []
        for last in self.sequences:
            if last.name == "opponent" or last.continued:
                continue
            conversation = last.conversation
            joined.sequence_names.append(last.name)
            joined.sequence_starts.append(
                (len(joined.ids), len(joined.logprobs), len(conversation.first.ids)))
            if last.full:
                episode.finish_reason = "length"
            if len(conversation.logprobs) > len(longest.logprobs):
                longest = conversation
                episode.row = episode.row | {"prompt": last.messages[:-len(conversation.messages)]}
            turns = []
            sequence = last
            while sequence and sequence.answer:
                turns.insert(0, (sequence.conversation.spans[-1], sequence.answer))
                sequence.answer = None
                sequence = sequence.continues
            end = 0
            for (start, next_end), answer in turns:
                joined.ids = joined.ids + conversation.ids[end:start]
                joined.add_turn(answer, {})
                end = next_end
        joined.messages = longest.messages
        episode.counts |= {"requests": len(self.sequences), "rows": len(joined.sequence_starts),
                           "untrained_tokens": self.sampled - len(joined.logprobs)}
        if joined.spans:
            episode.conversation = joined


def response_with(session, sequence, message, finish_reason, stream):
    """Return the response with an answer, in a single chunk if it is to be streamed."""
    calls = []
    turn_calls = message.get("tool_calls", [])
    for i, call in enumerate(turn_calls):
        finish_reason = "tool_calls"
        number = session.episode.counts["calls"] - len(turn_calls) + i      # in the whole episode
        arguments = json.dumps(call["function"]["arguments"])
        calls.append({"index": i} | tool_call(number, call["function"]["name"], arguments))
    start, end = sequence.conversation.spans[-1]
    completion = {
        "id": f"chatcmpl-{len(session.sequences)}", "created": 0, "model": "policy",
        "object": "chat.completion.chunk" if stream else "chat.completion",
        "choices": [{"index": 0, "finish_reason": finish_reason,
                     "delta" if stream else "message": message | {"tool_calls": calls}}],
        "usage": {"prompt_tokens": start, "completion_tokens": end - start, "total_tokens": end}}
    if not stream:
        return web.json_response(completion)
    return web.Response(text=f"data: {json.dumps(completion)}\n\ndata: [DONE]\n\n",
                        content_type="text/event-stream")


# ------------------------------------------------------------------------------------------------------------
# what a request says


def check_fields(body):
    """Raise ValueError for a field with a value that is not possible; print the names of unread fields."""
    for key, values in FIXED_FIELDS.items():
        if body.get(key) not in values:
            raise ValueError(f"{key} cannot be {shown(body[key])}")
    unread = sorted(key for key in body.keys() - READ_FIELDS if body[key] is not None)
    if unread:
        print_once("agent: the run's settings replace these fields of its requests:", *unread)


def tools_of(body):
    """Return the tools of a request as JSON, with the fields that OpenAI's clients may leave out."""
    tools = body.get("tools") or None
    for tool in tools or ():
        parameters = tool["function"].setdefault("parameters", {"type": "object"})
        parameters.setdefault("properties", {})
    return json.dumps(tools)


@lru_cache(maxsize=64)
def template_for(sampler, tools):
    """Return the Template for tools that are given as JSON."""
    template = Template(sampler.tokenizer, sampler.eos_ids, json.loads(tools))
    template.check([{"role": "user", "content": "?"}])
    return template


def for_template(messages):
    """Return messages of OpenAI as the chat template reads them, without thoughts.

    The ids of calls become those of any other episode, whatever ids the agent was told or uses.
    """
    messages_read = []
    ids = []                                    # the ids of the last turn's calls in the request
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        read = {"role": TEMPLATE_ROLES[message["role"]], "content": content}
        if message.get("tool_calls"):
            ids = [call.get("id") for call in message["tool_calls"]]
            read["tool_calls"] = [read_call((), i, call["function"])[0]
                                  for i, call in enumerate(message["tool_calls"])]
        if read["role"] == "tool":
            # The results of a turn may come in any order. An unknown id is taken for the first call's.
            number = ids.index(message["tool_call_id"]) if message.get("tool_call_id") in ids else 0
            read["tool_call_id"] = call_id(number)
        messages_read.append(read)
    return messages_read


def defused(message, template):
    """Return a message of for_template without control tokens in its texts.

    The author of the agent writes what the system says, but anybody may have written other messages.
    """
    if message["role"] == "system":
        return message
    return template.defused_message(message)
