"""
Strings that end an answer, --stop=... Runs without them do not open this file.
"""
import re

from configurator import InputError


class StopStrings:
    """The strings that the setting `stop` names.

    stop: the strings, with commas between them, where a backslash with an n stands for a line end. tokenizer:
    that of the engine's model. Raises InputError if a string is empty.
    """

    def __init__(self, stop, tokenizer):
        self.strings = stop.replace("\\n", "\n").split(",")
        if "" in self.strings:
            raise InputError(f"stop={stop}: a string between its commas is empty")
        self.tokenizer = tokenizer
        # How many of the newest tokens are decoded. No string has more bytes than the setting, and a token
        # with text has at least one. The 8 are for tokens without text.
        self.reach = len(stop.encode()) + 8
        self.completing = {}                    # {token: whether it may complete a string}

    def before(self, text):
        """Return the text up to the first of the strings."""
        return re.split("|".join(map(re.escape, self.strings)), text)[0]

    def completed_by(self, sampled):
        """Return whether the last of these sampled ids completes one of the strings."""
        token = sampled[-1]
        if token not in self.completing:
            # It is read twice, because some tokenizers drop a space where a text begins. Others put one after
            # a word when the next token comes. What stands for an incomplete character may become any one.
            text = " " + self.tokenizer.decode([token, token])
            self.completing[token] = any(string[-1] in text or "\ufffd" in text for string in self.strings)
        if not self.completing[token]:                          # most tokens, which saves most of the time
            return False
        newest = sampled[-self.reach:]
        # If tokens are bytes, some tokenizers read nothing of a text that begins inside a character, up to
        # the next token that is no byte. A character has at most four bytes, so one of the texts is readable.
        for start in range(4):
            text = self.tokenizer.decode(newest[start:])
            if any(string in text for string in self.strings):
                return True
        return False

    def watch(self, detokenizer):
        """Let vLLM end a request at one of the strings, as it does with a tokenizer of its own.

        detokenizer: the request's. vLLM calls its `update` after each token, and ends the request if it
        returns a string, or anything else that is true.
        """
        def update(new_token_ids, stop_terminated):
            detokenizer.token_ids += new_token_ids
            return self.completed_by(detokenizer.token_ids)

        detokenizer.update = update
