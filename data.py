"""Data: the rows of a task, their prompts as tokens, and which of them a step uses.

A row is a dict. Its `prompt` is a string or a list of chat messages, and the reward gets every other column.

    named_rows     the rows of a task: most are generated, gsm8k is fetched, file is your own
    encode_rows    rows with their prompts as token ids
    load_prompts   a run's training rows, of which Prompts.draw encodes what a step uses, and held-out prompts
    epoch_order    the order in which an epoch uses its rows
"""
import contextlib
import functools
import json
import math
import numbers
import os
import pickle
import random
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from tasks.generate_problems import generated_rows, held_out

NO_PROMPT = [{"role": "user", "content": ""}]
# Columns of a file that hold the answer; the first of them that a row has is taken.
ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth", "solution", "reference")
# Columns that hold the prompt; of the last two it is what stands before the assistant's last answer.
PROMPTS = ("prompt", "messages", "conversations")
KNOWN = "system developer user assistant tool".split()
# What else these roles are called, in small letters
ROLES = {"human": "user", "observation": "tool",
         **dict.fromkeys("gpt chatgpt bing bard bot model function_call".split(), "assistant")}
# Columns of what no model is shown here
MEDIA = "image images video videos audio audios".split()

# ------------------------------------------------------------------------------------------------------------
# rows


def named_rows(s, split):
    """Return the rows of a split, "train" or "eval", as pairs (name, row).

    s: settings. The name is file:line, or the text of a generated problem; a message about a row begins with
    its name. The tasks of tasks/generate_problems.py generate train_prompts or eval_prompts distinct
    problems of the difficulty that stands behind the task's name, algebra:2; with 0 these are 4,096 for
    "train" and 128 for "eval", or all that the task has if it has fewer. gsm8k and file give as many of their
    rows, as in `spread`, or with 0 all of them. Without an eval_file, task file sets one in eight prompts of
    train_file aside: their rows are "eval", the others "train". Raises ValueError if there are no such rows,
    or too few distinct problems.
    """
    count, seed = (s.train_prompts, s.seed) if split == "train" else (s.eval_prompts, 0)
    if s.task == "gsm8k":
        return spread(gsm8k_rows(split), count)
    if s.task == "file":
        return spread(split_rows(s, split), count)
    if s.task.startswith("reasoning_gym:"):
        # Only those who use the package wait for its import.
        from tasks.reasoning_gym import gym_rows
        return gym_rows(s.task.partition(":")[2], split, count, seed)
    task, _, level = s.task.partition(":")
    if not (level or "1").isdecimal() or int(level or 1) not in range(1, 101):
        raise ValueError(f"task={s.task}: a difficulty is a whole number from 1 to 100, as in algebra:2")
    return generated_rows(task, split, count, seed, int(level or 1))


def gsm8k_rows(split):
    # Cobbe et al. 2021, https://arxiv.org/abs/2110.14168. The original files are kept in a cache folder. The
    # prompt is verl's.
    name, sha256 = {"train": ("train.jsonl", "17f347dc5147"), "eval": ("test.jsonl", "3730d312f6e3")}[split]
    url = f"https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{name}"
    path = os.path.expanduser(f"~/.cache/gsm8k/{name}")
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with naming(f"gsm8k: {url} cannot be fetched to {path}"):
            torch.hub.download_url_to_file(url, path, sha256, progress=False)
    ask = ' Let\'s think step by step and output the final answer after "####".'
    return Rows([pickle.dumps((where, {"prompt": [{"role": "user", "content": row["question"] + ask}],
                                       "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
                                       "source": "gsm8k", "solution": row["answer"]}))
                 for where, row in file_rows(path, "question", "answer")])


class Rows:
    """A sequence of pairs (name, row), which are kept as bytes and made anew when they are read: as dicts a
    million rows of 1 KB take four times the memory, on every rank.

    packed: the pairs as bytes. columns: {column: None}; every row that is read has all of them, so that a
    reward gets the same columns at every step. sides: {split: the places of its rows in a file for both}.
    """

    def __init__(self, packed, columns={}, sides={}):
        self.packed, self.columns, self.sides = packed, columns, sides

    def take(self, places):
        """Return the Rows at these places."""
        return Rows([self.packed[place] for place in places], self.columns)

    def __len__(self):
        return len(self.packed)

    def __getitem__(self, place):
        packed = self.packed[place]
        if isinstance(place, slice):
            return Rows(packed, self.columns)
        name, row = pickle.loads(packed)
        return name, self.columns | row


def spread(rows, count):
    """Return `count` of the Rows, or all for 0, in their order.

    They are of each source in proportion and from anywhere in the file, because a file may be sorted.
    """
    if not 0 < count < len(rows):
        return rows
    sources = [str(row.get("source")) for _, row in rows]
    # Source after source, but within a source in a random order.
    order = sorted(epoch_order(len(rows), 0, 0), key=sources.__getitem__)
    return rows.take(sorted(order[place * len(rows) // count] for place in range(count)))


def split_rows(s, split):
    # The rows of your files that are on this side.
    path = s.eval_file if split == "eval" and s.eval_file else s.train_file
    # With an environment rows need no prompt, because its reset may give one.
    rows = file_rows(path, s.prompt_column, s.answer_column, s.chat, bool(s.environment))
    side = rows if s.eval_file else rows.take(rows.sides[split])
    if not side:
        raise ValueError(f"{path}: without an eval_file a hash of the prompt decides which rows are held "
                         f"out, and none of {len(rows)} is for {split}; --eval_file=... names held-out rows")
    return side


@functools.lru_cache(maxsize=1)
def file_rows(path, prompt_column="", answer_column="", chat=True, optional=False):
    # All Rows of a file, by the names file:line. It is read once for both splits. optional: whether a row needs
    # no prompt.
    answers = (answer_column,) if answer_column else ANSWERS
    packed, columns, sides, lacking = [], {}, {"train": [], "eval": []}, []
    for where, row in read_rows(path):
        with naming(where):
            row = json.loads(row) if isinstance(row, bytes) else row
            match row:
                case [*asked, {"ground_truth": {"value": truth}}]:      # as in Open-Reasoner-Zero's files
                    row = {"conversations": asked, "answer": truth}
            if not isinstance(row, dict):
                raise ValueError("not an object")
            for column in MEDIA:
                if row.get(column):
                    raise ValueError(f"{column} holds something, but a run reads text alone: leave out the "
                                     "row, or the column if the text does without it")
            prompt, answer = prompt_of(row, prompt_column, chat, optional), answer_of(row, answers)
        source = row.get("source") or row.get("data_source")
        row |= without_null({"prompt": prompt, "answer": answer, "source": source})
        if answer is None:
            lacking.append(len(packed))
        text = whole_text(row["prompt"]) or json.dumps(row, ensure_ascii=False, default=str)
        sides["eval" if held_out(text) else "train"].append(len(packed))
        packed.append(pickle.dumps((where, row)))
        columns |= dict.fromkeys(row)
    if not packed:
        raise ValueError(f"{path}: no rows")
    rows = Rows(packed, columns, sides)
    if lacking and (answer_column or len(lacking) < len(rows)):
        where, row = rows[lacking[0]]
        raise ValueError(f"{where}: no answer in {' or '.join(answers)}; the columns are "
                         f"{', '.join(row)}: --answer_column=...")
    return rows


@contextlib.contextmanager
def naming(where):
    # Begins the message of whatever goes wrong with `where`, such as a file and a line.
    try:
        yield
    except Exception as error:
        raise ValueError(f"{where}: {error if isinstance(error, ValueError) else repr(error)}") from error


def prompt_of(row, prompt_column, chat, optional):
    # Returns a row's prompt in the form that encode_rows takes: a string or messages.
    column = prompt_column or next((key for key in PROMPTS if row.get(key) is not None), "prompt")
    prompt = row.get(column)
    if prompt is None and optional:
        return NO_PROMPT
    if prompt is None:
        raise ValueError(f"no column {column}; the columns are {', '.join(row) or 'none'}: "
                         "--prompt_column=...")
    if isinstance(prompt, str) and prompt_column and chat:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list):
        prompt = [*map(as_message, prompt)]
        if column != "prompt" and prompt and prompt[-1]["role"] == "assistant":
            prompt.pop()                                        # the policy is to find it
        if row.get("system") and prompt and prompt[0]["role"] != "system":
            prompt.insert(0, as_message({"role": "system", "content": row["system"]}))
    elif not isinstance(prompt, str):
        raise ValueError(f"prompt must be a string or a list of messages, not {prompt!r:.100}")
    # Half a surrogate pair cannot be encoded.
    if not whole_text(prompt).strip().encode():
        raise ValueError("empty prompt")
    return prompt


def as_message(message):
    """Return a message of a file as chat templates expect it: with role and content, and without null, which
    Arrow writes into every field that another message has. The arguments of a call may be a JSON string, and
    are {} where there are none."""
    # Rows of a parquet file may hold dates.
    said = json.loads(json.dumps(message, default=str), object_hook=without_null) if isinstance(
        message, dict) else {}
    if "from" in said:                                          # ShareGPT's form
        said = {"role": said.pop("from"), "content": said.pop("value", "")} | said
    role = str(said.get("role")).lower()
    if role == "function_call":
        written = json.loads(said.pop("content"))
        calls = written if isinstance(written, list) else [written]
        said["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    for call in said.get("tool_calls", []):
        said.setdefault("content", "")
        function = call.get("function", call)
        arguments = function.get("arguments", "")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments.strip() or "{}")
        function["arguments"] = {} if arguments is None else arguments
        if not isinstance(function["arguments"], dict):
            raise ValueError(f"the arguments of a call must be a JSON object, not {arguments!r:.100}")
    said["role"] = ROLES.get(role, role)
    if said["role"] not in KNOWN or not isinstance(said.get("content"), str):
        raise ValueError(f"a message needs a role, one of {', '.join(KNOWN)}, and a content, a string: "
                         f"{message!s:.100}")
    return said


def without_null(fields):
    return {key: value for key, value in fields.items() if value is not None}


def answer_of(row, columns):
    # The answer of a row as the first of the columns with one has it: a text, a number, a list of these, or
    # None.
    judged = row["reward_model"] if isinstance(row.get("reward_model"), dict) else {}
    truths = row | {"reward_model.ground_truth": judged.get("ground_truth")}
    for key in columns:
        truth = truths.get(key)
        several = truth if isinstance(truth, list) else [truth]
        # A text that says something, or a number other than NaN and infinity
        if several and all(one.strip() if isinstance(one, str) else isinstance(one, numbers.Number)
                           and abs(one) < math.inf for one in several):
            return truth
        # What verl's form holds may be anything that a reward understands; then it is no answer.
        if truth is not None and key != "reward_model.ground_truth":
            raise ValueError(f"{key} must be text or a finite number, not {truth!r:.100}; "
                             "a list may hold several; a column of another name goes to the reward as it is")


def read_rows(path):
    # Yields the rows of a file as pairs (where, row); a row of JSONL is its line.
    whole = Path(os.path.expanduser(path))
    if whole.suffix not in (".jsonl", ".json", ".parquet") or not whole.is_file():
        raise ValueError(f"{path or 'train_file or eval_file'}: no such file of .jsonl, .json or .parquet")
    with naming(path), open(whole, "rb") as file:
        if whole.suffix == ".parquet":
            rows = parquet_rows(file)
        else:
            # There may be a byte order mark, which json reads over.
            if not file.peek().lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}:{number}", line
                return
            rows = json.load(file)
        for number, row in enumerate(rows, 1):
            yield f"{path}: row {number}", row


def parquet_rows(file):
    # Yields the rows of a parquet file.
    import pyarrow.parquet                                      # only those who have such a file wait for it
    for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1000):
        # In float32 0.1 is to be 0.1, and not 0.10000000149.
        columns = [column.cast(pyarrow.string()).cast(pyarrow.float64()) if column.type == pyarrow.float32()
                   else column for column in batch.columns]
        yield from pyarrow.table(columns, batch.schema.names).to_pylist()


# ------------------------------------------------------------------------------------------------------------
# prompts


class Prompt(NamedTuple):
    row: dict
    ids: list               # token ids, including those that the chat template adds
    number: int = 0         # of a prompt of Prompts: the number of its row
    epoch: int = 0          # of a drawn prompt: how many times all rows had been drawn before


def encode_rows(tokenizer, named, chat=True, system_prompt="", tools=None):
    """Return a Prompt for each of the pairs (name, row) that named_rows returns.

    Messages go through the tokenizer's chat template, or with chat=False are joined to plain text; a string
    is taken as it is. Where the last message is the assistant's, the completion will continue it. tools: JSON
    schemas for the template. Raises ValueError for messages without a template or with one that fails, and
    for a string with a system prompt.
    """
    texts = [as_text(tokenizer, name, row["prompt"], chat, system_prompt, tools) for name, row in named]
    # All at once, which is faster. A template writes the special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=False).input_ids if texts else []
    start, prompts = start_of(tokenizer), []
    for (name, row), ids in zip(named, encoded):
        if not ids or max(ids) >= getattr(tokenizer, "embedded", math.inf):
            raise ValueError(f"{name}: its prompt has no tokens, or a token that the model does not have")
        plain = not chat or isinstance(row["prompt"], str)
        prompts.append(Prompt(row, start + ids if plain and ids[:len(start)] != start else ids))
    return prompts


@functools.lru_cache(maxsize=1)
def start_of(tokenizer):
    # The tokens that a plain text begins with. What the tokenizer puts at its end is left out.
    a, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    return whole[:next(i for i in range(len(whole)) if whole[i:i + len(a)] == a)]


def as_text(tokenizer, name, prompt, chat, system_prompt, tools):
    # The text of a prompt, before it is encoded.
    if isinstance(prompt, str):
        if system_prompt:
            raise ValueError(f"{name}: system_prompt needs prompts that are lists of messages, not strings")
        return prompt
    messages = ([{"role": "system", "content": system_prompt}] if system_prompt else []) + prompt
    continued = messages[-1]["role"] == "assistant"
    if not chat:
        return whole_text(messages) + ("" if continued else "\n")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not continued,
                                             continue_final_message=continued, tools=tools)
    except Exception as error:      # of all kinds, about the order of roles, for example
        raise ValueError(f"{name}: the chat template, which --chat=false does without, fails for "
                         f"{messages!r:.300}: {error!r}") from error


class Prompts:
    """The rows of a split. A prompt is encoded when it is drawn: 200,000 would take a minute and 2 GB.

    named: pairs (name, row). s: a run's settings. tools: as in encode_rows.
    """

    def __init__(self, tokenizer, named, s, tools=None):
        self.tokenizer, self.named, self.s, self.tools = tokenizer, named, s, tools

    def encoded(self, numbers):
        """Return a Prompt for each of the rows with these numbers."""
        prompts = encode_rows(self.tokenizer, [self.named[i] for i in numbers], self.s.chat,
                              self.s.system_prompt, self.tools)
        return [prompt._replace(number=number) for prompt, number in zip(prompts, numbers)]

    def draw(self, position, count, seed):
        """Return the next `count` prompts that fit, the same on every rank, and the new position.

        position: the place in the endless sequence of epochs, 0 at the start of a run. Each epoch has its own
        order (epoch_order), so resuming needs no more.
        """
        size, drawn = len(self.named), []
        while len(drawn) < count:
            places = range(position, position + count - len(drawn))
            rows = [epoch_order(size, place // size, seed)[place % size] for place in places]
            drawn += [prompt._replace(epoch=place // size) for prompt, place in zip(self.encoded(rows), places)
                      if len(prompt.ids) <= self.s.max_prompt_length]
            position = places.stop
        return drawn, position


def load_prompts(tokenizer, settings, tools=None):
    """Return a run's training rows as Prompts, its held-out prompts as a list, and a sentence about both.

    settings: what configure returns. tools: as in encode_rows. The sentence is followed by the first prompt
    as the model reads it, with its answer. Raises ValueError where load_split does.
    """
    train_set, fitting, train_note = load_split(tokenizer, settings, "train", tools)
    _, eval_set, eval_note = load_split(tokenizer, settings, "eval", tools)
    return train_set, eval_set, (f"The run trains on {train_note} and is evaluated on {eval_note}.\n"
                                 f"{as_read(tokenizer, fitting[0])}")


def as_read(tokenizer, prompt):
    # A prompt as the model reads it, with its special tokens, cut in the middle, and its answer.
    text = tokenizer.decode(prompt.ids)
    if len(text) > 1000:
        text = f"{text[:500]}\n... {len(text) - 1000} characters ...\n{text[-500:]}"
    lines = ["The model reads the first prompt as", *text.split("\n")]
    if isinstance(prompt.row["prompt"], str) and tokenizer.chat_template:
        lines.append("(A string is read as it is. The model's chat template is for lists of messages.)")
    return "\n    ".join([*lines, f"and its answer is {prompt.row.get('answer')!r:.200}"])


def load_split(tokenizer, settings, split, tools=None, **changed):
    """Return the Prompts of a split, "train" or "eval", a list of those that are encoded, and a note on both.

    Encoded are the first 512 training prompts of the first epoch, and all held-out prompts, which are the
    same for every seed. Those of more than max_prompt_length tokens are left out. tools: as in encode_rows.
    changed: settings that have another value here, such as the eval_file of a second evaluation. Raises
    ValueError where named_rows or encode_rows does, or if none fits.
    """
    s = SimpleNamespace(**vars(settings) | changed)
    prompts = Prompts(tokenizer, named_rows(s, split), s, tools)
    total, source = len(prompts.named), (s.eval_file if split == "eval" else "") or s.train_file or s.task
    kinds = {}
    for name, row in prompts.named:
        messages = [] if isinstance(row["prompt"], str) else row["prompt"]
        kind = tuple((message["role"], "tool_calls" in message) for message in messages)
        # An observation or a call of a tool would have no place in them.
        if (s.environment or s.tools) and (not kind or kind[-1][0] == "assistant"):
            raise ValueError(f"{name}: an environment and tools need prompts that are lists of messages, the "
                             "last one not the assistant's")
        kinds.setdefault(kind, (name, row["prompt"]))
    # What the template refuses or leaves out is told now, and not after hours. It may shorten an earlier answer
    # and rewrite what a tool has returned.
    for kind, (name, prompt) in kinds.items():
        text = as_text(tokenizer, name, prompt, s.chat, s.system_prompt, tools)
        for message in ({"role": "system", "content": s.system_prompt}, *(prompt if kind else ())):
            if message["role"] not in ("assistant", "tool") and message["content"].strip() not in text:
                raise ValueError(f"{name}: the chat template leaves out {message!r:.200}")
    encoded = prompts.encoded(epoch_order(total, 0, s.seed)[:512] if split == "train" else range(total))
    fitting = [prompt for prompt in encoded if len(prompt.ids) <= s.max_prompt_length]
    if not fitting:
        shortest = min(len(prompt.ids) for prompt in encoded)
        raise ValueError(f"max_prompt_length={s.max_prompt_length}: none of {len(encoded)} {split} prompts "
                         f"fits; the shortest has {shortest} tokens")
    kind, long = {"train": "", "eval": "held-out "}[split], len(encoded) - len(fitting)
    return prompts, fitting, (
        f"{total:,} {kind}prompts of {source} ({long:,} of {len(encoded):,} have more than "
        f"max_prompt_length={s.max_prompt_length} tokens and are left out)")


def whole_text(prompt):
    # All of the prompt: the string, or the contents of all messages.
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


@functools.lru_cache(maxsize=4)
def epoch_order(num_rows, epoch, seed):
    """Return the row numbers in the order in which an epoch uses them, a permutation."""
    return random.Random(f"{seed} {epoch}").sample(range(num_rows), num_rows)
