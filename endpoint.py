"""
Agents: programs that play episodes by asking the policy, through an OpenAI-compatible endpoint on 127.0.0.1.

    async def solve(base_url, api_key, row):    # --agent=my_agent.py:solve; a plain def will do as well
        ...                                     # it asks as often as it likes
        return 1.0                              # the score: a number, None, or a dict of parts

The process whose engine steps serves the endpoint in a thread and answers the requests of all episodes
together; the key says which episode speaks. A request whose messages continue an earlier one of its episode,
with the answer as it was returned, continues that row of tokens, where all that was sampled stays as it was.
Any other request begins a row of its own. The longest row of an episode is trained, and the others are not.
Neither are rows of the model "opponent", which is the policy as another player.
"""
import asyncio
import contextlib
import copy
import json
import socket
from concurrent.futures import Future, InvalidStateError
from functools import cache, lru_cache, partial
from queue import SimpleQueue
from secrets import token_hex

from aiohttp import web

from conversation import Conversation
from episodes import Episode, in_thread
from runtime.chat_template import Template, read_call, tool_call
from runtime.user_code import Failed, TimeUp, outcome, shown

ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}
# The fields of a request that are read. Those of ONLY can have no other values, because the policy is sampled
# as it is.
ONLY = {"n": (None, 1), "response_format": (None, {"type": "text"}), "tool_choice": (None, "auto")}
READ = {"messages", "tools", "model", "stream", "stream_options", "parallel_tool_calls", *ONLY}


def refusal(status, text):
    return web.json_response({"error": {"message": text, "type": "invalid_request_error"}}, status=status)


def as_read(messages):
    # Messages as the chat template reads them, without thoughts. The ids of calls are those of any other
    # episode, whatever the agent was told or says.
    messages_read, ids = [], []                 # ids: those that the calls of the last turn have in the request
    for message in messages:
        content, calls = message.get("content") or "", message.get("tool_calls") or ()
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        read = {"role": ROLES[message["role"]], "content": text}
        if calls:
            ids = [call.get("id") for call in calls]
            read["tool_calls"] = [read_call({}, i, call["function"])[0] for i, call in enumerate(calls)]
        if read["role"] == "tool":
            # The results of a turn may come in any order.
            call_id = message.get("tool_call_id")
            number = ids.index(call_id) if call_id in ids else 0
            read["tool_call_id"] = tool_call(number, "", {})["id"]
        messages_read.append(read)
    return messages_read


@lru_cache(maxsize=64)
def template_for(player, tools):
    # Returns the Template for tools that are given as JSON.
    template = Template(player.tokenizer, player.eos_ids, json.loads(tools))
    template.check([{"role": "user", "content": "?"}])
    return template


PLAYING = {}                            # {key: AgentEpisode}


@cache
def serve():
    """Begin to listen to the agents of all episodes, once, and return the URL."""
    app = web.Application(client_max_size=2**22)                # bytes of a request
    app.add_routes([web.post("/v1/chat/completions", hear)])
    listener = socket.create_server(("127.0.0.1", 0))
    in_thread(partial(web.run_app, app, sock=listener, print=None, access_log=None, handle_signals=False,
                      handler_cancellation=True))               # cancels `hear` if its client leaves
    return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


async def hear(request):
    """Hand a request to the episode of its key, and wait for the answer."""
    key = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if episode := PLAYING.get(key):
        # Only what has a key is read, because it takes memory.
        episode.mail.put((future := Future(), await request.read()))
        # If the episode ends from here on, _begin finds the future; otherwise it may have missed it.
        if key in PLAYING:
            return await asyncio.wrap_future(future)
    return refusal(401, "this key belongs to no episode that is being played")


def deliver(future, reply):
    with contextlib.suppress(InvalidStateError):                # its client has left
        future.set_result(reply)


print_once = cache(print)               # the same words only once


class AgentEpisode(Episode):
    """An episode that an agent plays. Its requests are answered one after the other, as they come.

    score: what the agent returned. rows: the Conversation of each answered request, up to its answer. Each
    also has the attributes opponent, read (the messages of its prompt and its own, each through as_read) and
    before (the Conversation that it continues, or None). key: what the agent shows. mail: what came and is
    not answered, pairs of a Future and a request, and in the end of None and the agent's outcome. longest:
    how many tokens may precede the first answer. full: whether a limit has refused or cut off a turn. asking:
    the Future of the request for which the engine samples, or None. unheard: how many answers were dropped
    because their clients had left. refused: why its last refused request was refused.
    """

    def __init__(self, player, row, first):
        super().__init__(player, row, first)
        self.key, self.mail, self.rows, self.full = token_hex(), SimpleQueue(), [], False
        self.longest = max(self.settings.max_prompt_length, len(first.ids))
        self.asking, self.unheard, self.refused = None, 0, ""

    @property
    def abandoned(self):
        return self.asking is not None and self.asking.cancelled()

    def _begin(self):
        # All that the agent does. Its thread, which may never end, does not keep the episode.
        PLAYING[self.key], mail = self, self.mail
        solve = partial(self.player.make, serve(), self.key, copy.deepcopy(self.row))
        in_thread(lambda: mail.put((None, outcome(solve))))
        try:
            while (heard := (yield from self._call(mail.get, timeout=self.settings.call_timeout or None)))[0]:
                future, body = heard
                if future.cancelled():
                    continue
                try:
                    reply = yield from self._answer(json.loads(body), future)
                # An agent may send anything.
                except Exception as error:
                    self.refused = shown(error)
                    reply = refusal(400, self.refused)
                deliver(future, reply)
        except (Failed, TimeUp) as late:
            raise Failed(f"took more than call_timeout={self.settings.call_timeout:g} seconds") from late
        finally:
            # Listens to the agent no longer, and refuses what it has asked. In this order, because the
            # endpoint's thread may be about to add another request: see hear.
            del PLAYING[self.key]
            if self.asking:                                     # the episode is aborted
                deliver(self.asking, refusal(401, "the episode of this key has ended"))
            while not mail.empty():
                if future := mail.get()[0]:
                    deliver(future, refusal(401, "the episode of this key has ended"))
        _, (self.score, error, _) = heard
        if error or not self.talk.spans:
            problem = error or Failed("never asked the policy, or did not wait for an answer")
            if self.refused:
                raise Failed(f"{problem}; its last refused request: {self.refused}")
            raise problem
        self.instance, self.ended = self, "length" if self.full else "stop"     # rewards read its score

    def _answer(self, body, future):
        # Samples an answer in the row that a request continues, or in a new one, and returns what the agent
        # gets, or None if it no longer waits. Raises an error if there can be no answer.
        if refused := [key for key, values in ONLY.items() if body.get(key) not in values]:
            raise ValueError(f"{refused[0]} cannot be {shown(body[refused[0]])}")
        if strange := sorted({key for key, value in body.items() if value is not None} - READ):
            print_once("agent: the run's settings replace these fields of its requests:", *strange)
        for tool in body.get("tools") or ():                    # OpenAI's clients may leave these out
            tool["function"].setdefault("parameters", {"type": "object"}).setdefault("properties", {})
        template = template_for(self.player, json.dumps(body.get("tools") or None))
        opponent, read = body.get("model") == "opponent", as_read(body["messages"])
        # The longest first: if the agent says all that was said each time, there is one comparison.
        if before := next((row for row in sorted(self.rows, key=lambda row: -len(row.read))
                           if (row.opponent, row.template.tools) == (opponent, template.tools)
                           and row.read == read[:len(row.read)]), None):
            row = copy.copy(before)
            fits = row.add_reply(read[len(before.read):])
        else:
            # The author of the agent wrote what the system says, but anybody may have written the rest.
            safe = [one if one["role"] == "system" else json.loads(template.defused(json.dumps(
                one, ensure_ascii=False))) for one in read]
            row = Conversation(self.talk.first._replace(ids=template.opening(safe)), template)
            row.opponent, fits = opponent, len(row.ids) <= self.longest
        self.full = self.full or not fits
        if not fits:
            raise ValueError(f"the maximum context length is {self.longest} + {row.first.max_tokens} tokens")
        # Of all answers in all rows, so that no two have the same seed. What was refused takes none.
        self.asking = future
        answer = yield row.request(len(self.rows) + self.unheard + 1)
        self.asking = None
        # From here on the client can no longer take its request back.
        if not future.set_running_or_notify_cancel():
            self.unheard += 1
            return None
        n, m, cut = len(row.ids), len(answer.ids), answer.finish_reason == "length"
        text, said, calls = self._read(row, answer)
        wrong = sum(bool(problem) for _, problem in calls)
        if wrong:                                               # a call that cannot be made stays a text
            said, calls = {"role": "assistant", "content": text}, []
        told = said | {"tool_calls": [{"index": i} | tool_call(
            self.counts["calls"] + i, call["function"]["name"], json.dumps(call["function"]["arguments"]))
            for i, (call, _) in enumerate(calls)]}
        said |= {"tool_calls": [call for call, _ in calls]} if calls else {}
        row.add_turn(answer, said)
        row.read, row.before = read + as_read([said]), before
        self.rows.append(row)
        if not row.opponent and len(row.logprobs) > len(self.talk.logprobs):
            self.talk, self.full, self.row = row, cut, self.row | {"prompt": row.read[:-len(row.messages)]}
        own = [one for one in self.rows if not one.opponent]
        sampled = sum(end - start for one in own for start, end in one.spans[-1:])
        self.counts |= {"requests": len(self.rows), "rows": len({*own} - {one.before for one in own}),
                        "untrained_tokens": sampled - len(self.talk.logprobs),
                        "calls": self.counts["calls"] + len(calls) + wrong,
                        "failures": self.counts["failures"] + wrong}
        reason, stream = "length" if cut else "tool_calls" if calls else "stop", body.get("stream")
        reply = {"id": f"chatcmpl-{len(self.rows)}", "created": 0, "model": "policy",
                 "object": "chat.completion" + ".chunk" * bool(stream), "choices": [
                     {"index": 0, "delta" if stream else "message": told, "finish_reason": reason}],
                 "usage": {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m}}
        return web.Response(text=f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n",
                            content_type="text/event-stream") if stream else web.json_response(reply)
