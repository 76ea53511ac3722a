"""Data: the rows of a task, their prompts as tokens, and which of them a step uses.

A row is a dict. Its `prompt` is a string or a list of chat messages, and the reward gets every other column.
A row has a name, file:line or the text of its problem, with which a message about the row begins.

    named_rows     the rows of a task: most are generated, gsm8k is fetched, file is your own
    encode_rows    rows with their prompts as token ids
    load_prompts   a run's training rows, of which Prompts.draw encodes what a step uses, and held-out prompts
    epoch_order    the order in which an epoch uses its rows
"""
import contextlib
import functools
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

from configurator import InputError, is_of_library

# ------------------------------------------------------------------------------------------------------------
# rows


def named_rows(s, split):
    """Return the rows of a split, "train" or "eval", as a sequence of pairs (name, row).

    s: settings. The tasks of tasks/generate_problems.py generate train_prompts or eval_prompts distinct
    problems of the difficulty that stands behind the task's name, as in algebra:2; with 0 these are 4,096 for
    "train" and 128 for "eval", or all that the task has if it has fewer. gsm8k and file give this number of
    their rows, or with 0 all of them. Without an eval_file, task file sets one in eight prompts of train_file
    aside: the rows with these prompts are "eval", the others "train". Raises InputError if there are no such
    rows, or too few distinct problems.
    """
    count = s.eval_prompts
    seed = 0
    if split == "train":
        count = s.train_prompts
        seed = s.seed
    if s.task == "gsm8k":
        from options.gsm8k import gsm8k_rows
        return gsm8k_rows(split).spread(count)
    if s.task == "file":
        from options.files import split_rows
        return split_rows(s, split).spread(count)
    task, _, variant = s.task.partition(":")
    if task == "reasoning_gym":
        # Only the runs that use the package import this.
        from tasks.reasoning_gym import gym_rows
        return gym_rows(variant, split, count, seed)
    difficulty = variant or "1"
    if difficulty not in map(str, range(1, 101)):
        raise InputError(f"task={s.task}: a difficulty is a whole number from 1 to 100, as in algebra:2")
    from tasks.generate_problems import generated_rows
    return generated_rows(task, split, count, seed, int(difficulty))


@contextlib.contextmanager
def naming(name):
    # Begins the message of whatever is wrong with a file or a row with its name.
    try:
        yield
    except Exception as error:
        if not is_of_library(error):
            raise
        raise InputError(f"{name}: {error if isinstance(error, ValueError) else repr(error)}") from error


# ------------------------------------------------------------------------------------------------------------
# prompts


class Prompt(NamedTuple):
    """A row with its prompt as tokens."""
    row: dict
    ids: list               # token ids, including those that the chat template adds
    number: int = 0         # the number of the row in Prompts
    epoch: int = 0          # how many times all rows had been drawn before this prompt was
    begun: int = 0          # how many tokens at the end of ids are the beginning of the completion
    shown: object = None    # an images.Shown if it shows images


def encode_rows(tokenizer, rows, chat=True, system_prompt="", tools=None):
    """Return a Prompt for each of the rows, which are pairs (name, row) as named_rows returns them.

    Messages go through the tokenizer's chat template, or with chat=False are joined to plain text; a string
    is taken as it is. Where the last message is the assistant's, the completion will continue it. tools: JSON
    schemas for the template, for rows that have none of their own. Raises InputError for messages without a
    template or with one that fails, and for a string with a system prompt.
    """
    texts = [as_text(tokenizer, name, row["prompt"], chat, system_prompt, row.get("tools") or tools)
             for name, row in rows]
    if not texts:
        return []
    # All at once, which is faster. A template writes the special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=False).input_ids
    # model_folder.load_tokenizer says how many tokens the model embeds; a tokenizer of your own need not.
    embedded = getattr(tokenizer, "embedded", math.inf)
    prompts = []
    for (name, row), text, ids in zip(rows, texts, encoded):
        if row.get("images"):
            from options.images import with_images
            prompts.append(with_images(tokenizer, name, row, text, ids))
            continue
        if not ids or max(ids) >= embedded:
            raise InputError(f"{name}: its prompt has no tokens, or a token that the model does not have")
        if not chat or isinstance(row["prompt"], str):
            start = start_of(tokenizer)
            if ids[:len(start)] != start:
                ids = start + ids
        prompts.append(Prompt(row, ids))
    return prompts


def start_of(tokenizer):
    # Returns the tokens with which a plain text begins. The tokenizer may also put tokens at its end.
    letter = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    return whole[:whole.index(letter[0])]


def as_text(tokenizer, name, prompt, chat, system_prompt, tools):
    # Returns the text of a prompt, before it is encoded.
    if isinstance(prompt, str):
        if system_prompt:
            raise InputError(f"{name}: system_prompt needs prompts that are lists of messages, not strings")
        return prompt
    if system_prompt:
        prompt = [{"role": "system", "content": system_prompt}, *prompt]
    continued = prompt[-1]["role"] == "assistant"
    if not chat:
        return whole_text(prompt) + ("" if continued else "\n")
    try:
        return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=not continued,
                                             continue_final_message=continued, tools=tools)
    except Exception as error:      # of all kinds, about the order of roles, for example
        raise InputError(f"{name}: the chat template, which --chat=false does without, fails for "
                         f"{prompt!r:.300}: {error!r}") from error


def whole_text(prompt):
    # Returns all of a prompt: the string, or the contents of all messages.
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


@functools.cache
def say_once(message):
    # Prints a message of which all ranks know, if it was not printed before.
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)


@dataclass
class Prompts:
    """The rows of a split. A prompt is encoded when it is drawn: 200,000 would take a minute and 2 GB."""
    tokenizer: object
    rows: Sequence          # of pairs (name, row)
    s: SimpleNamespace      # the run's settings
    tools: list = None      # as in encode_rows

    def encoded(self, numbers):
        """Return a Prompt for each of the rows with these numbers."""
        prompts = encode_rows(self.tokenizer, [self.rows[number] for number in numbers], self.s.chat,
                              self.s.system_prompt, self.tools)
        return [prompt._replace(number=number) for prompt, number in zip(prompts, numbers)]

    def draw(self, position, count, seed):
        """Return the next `count` prompts that fit, the same on every rank, and the new position. A row that
        the chat template refuses is passed over as well, and named once.

        position: the place in the endless sequence of epochs, 0 at the start of a run. Each epoch has its own
        order (epoch_order), so resuming needs no more.
        """
        size = len(self.rows)
        drawn = []
        while len(drawn) < count:
            epoch, place = divmod(position, size)
            position += 1
            try:
                [prompt] = self.encoded([epoch_order(size, epoch, seed)[place]])
            except InputError as error:
                say_once(f"{error}: this row is passed over")
                continue
            if len(prompt.ids) <= self.s.max_prompt_length:
                drawn.append(prompt._replace(epoch=epoch))
        return drawn, position

    def check(self):
        """Raise InputError now, and not after hours, for a row that an environment or the template refuses.
        """
        s = self.s
        if s.task == "file" or s.model != "tiny" or s.system_prompt or s.chat_template:
            from options.row_checks import check_rows
            check_rows(self)


def load_prompts(tokenizer, settings, tools=None):
    """Return a run's training rows as Prompts, its held-out prompts as a list, and a sentence about both.

    settings: what configure returns. tools: as in encode_rows. The sentence is followed by the first prompt
    as the model reads it, with its answer. Raises InputError where load_split does.
    """
    train_set, fitting, train_note = load_split(tokenizer, settings, "train", tools)
    _, eval_set, eval_note = load_split(tokenizer, settings, "eval", tools)
    note = f"The run trains on {train_note} and is evaluated on {eval_note}.\n"
    if settings.task == "file":
        from options.files import unread_columns
        note += unread_columns(train_set)
    return train_set, eval_set, note + shown_prompt(tokenizer, fitting[0])


def shown_prompt(tokenizer, prompt):
    # Returns a prompt as the model reads it, with its special tokens, or the end of it; and its answer.
    text = tokenizer.decode(prompt.ids)
    if len(text) > 1000:
        text = f"... {text[-1000:]}"
    lines = ["The model reads the first prompt as", *text.split("\n")]
    if isinstance(prompt.row["prompt"], str) and tokenizer.chat_template:
        lines.append("(A string is read as it is. The model's chat template is for lists of messages.)")
    lines.append(f"and its answer is {prompt.row.get('answer')!r:.200}")
    return "\n    ".join(lines)


def load_split(tokenizer, settings, split, tools=None, **changed):
    """Return the Prompts of a split, "train" or "eval", a list of those that are encoded, and a note on both.

    The first 512 training prompts of the first epoch are encoded, and all held-out prompts, which are the
    same for every seed. Prompts of more than max_prompt_length tokens are left out. tools: as in encode_rows.
    changed: settings that have another value here, such as the eval_file of a second evaluation. Raises
    ValueError where named_rows, Prompts.check or encode_rows does, or if no prompt fits.
    """
    s = SimpleNamespace(**vars(settings) | changed)
    prompts = Prompts(tokenizer, named_rows(s, split), s, tools)
    prompts.check()
    total = len(prompts.rows)
    numbers = range(total)
    source = s.train_file or s.task
    kind = ""
    if split == "train":
        numbers = epoch_order(total, 0, s.seed)[:512]
    else:
        source = s.eval_file or source
        kind = "held-out "
    encoded = prompts.encoded(numbers)
    fitting = [prompt for prompt in encoded if len(prompt.ids) <= s.max_prompt_length]
    if not fitting:
        shortest = min(len(prompt.ids) for prompt in encoded)
        raise InputError(f"max_prompt_length={s.max_prompt_length}: none of {len(encoded)} {split} prompts "
                         f"fits; the shortest has {shortest} tokens")
    long = len(encoded) - len(fitting)
    return prompts, fitting, (
        f"{total:,} {kind}prompts of {source} ({long:,} of {len(encoded):,} have more than "
        f"max_prompt_length={s.max_prompt_length} tokens and are left out)")


@functools.lru_cache(maxsize=4)
def epoch_order(num_rows, epoch, seed):
    """Return the row numbers in the order in which an epoch uses them, a permutation."""
    return random.Random(f"{seed} {epoch}").sample(range(num_rows), num_rows)
