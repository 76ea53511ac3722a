"""
A conversation as a row of tokens in the making: a prompt, the turns of the policy as they were sampled, and
between them what an environment or an agent says. No token is ever encoded a second time.

episodes.py and agents.py play conversations. A script of your own may do so as well, with any engine:

    conversation = Conversation(request, template)
    answer = ...                        # what an engine samples for conversation.request(1)
    conversation.add_turn(answer, {"role": "assistant", "content": "Is it 7?"})
    fits = conversation.add_reply([{"role": "user", "content": "It is higher."}])
"""
import zlib


class Conversation:
    """A row of tokens to which turns and replies are added.

    first       the rollout.Request for the first turn; its max_tokens counts all tokens after the prompt
    template    a options.chat_template.Template, which only add_reply needs
    max_length  how many tokens the row may have
    ids         the tokens of the row so far
    messages    the turns and replies so far, as messages; the prompt is not among them
    spans       a pair (start, end) for each turn: the policy sampled ids[start:end]
    logprobs    the engine's logprob of each sampled token
    kept        for each sampled token the ids that it was drawn from, as in rollout.Answer
    versions    {index of a sampled token: the version of the weights that sampled from there on}
    sequence_starts  as in rollout.Rollout; a conversation is one sequence, until an AgentSession joins
                     several
    sequence_names   as in rollout.Rollout

    A method puts a new list into the place of an old one and changes none. So a copy.copy() of a conversation
    can go on in another way, and leaves the original as it is.
    """

    def __init__(self, first, template=None):
        self.first = first
        self.template = template
        self.max_length = len(first.ids) + first.max_tokens
        self.ids = first.ids
        self.messages = []
        self.spans = []
        self.logprobs = []
        self.kept = []
        self.versions = {}
        self.sequence_starts = [(0, 0, len(first.ids))]
        self.sequence_names = []

    def request(self, turn):
        """Return the Request for the next turn, which may take all tokens that are left.

        turn: the number of the turn, from 1. Each turn gets a seed of its own from it.
        """
        seed = self.first.seed
        if turn > 1:
            seed = zlib.crc32(f"{seed} {turn}".encode())
        return self.first._replace(ids=self.ids, seed=seed, max_tokens=self.max_length - len(self.ids))

    def add_turn(self, answer, message):
        """Append a turn of the policy.

        answer: the rollout.Answer with what an engine sampled. message: the same turn as a message.
        """
        start = len(self.ids)
        self.ids = self.ids + answer.ids
        self.spans = [*self.spans, (start, len(self.ids))]
        # An Answer counts its own tokens from 0.
        sampled = len(self.logprobs)
        self.versions = self.versions | {sampled + t: version for t, version in answer.versions}
        self.logprobs = self.logprobs + answer.logprobs
        self.kept = [*self.kept, *answer.kept]
        self.messages = [*self.messages, message]

    def add_reply(self, messages):
        """Append the messages that follow a turn, as the chat template writes them, and the beginning of the
        next turn.

        Return whether there is room for these and for one sampled token. If not, nothing is appended.
        """
        ended = self.ids[-1] in self.template.eos_ids           # and not by a stop string
        inserted = self.template.between(self.messages[-1], messages, ended)
        if len(self.ids) + len(inserted) >= self.max_length:
            return False
        self.ids = self.ids + inserted
        self.messages = self.messages + messages
        return True
