"""Data: the rows of a task, their prompts as tokens, and which of them a step uses.

A row is a dict. Its `prompt` is a string or a list of chat messages, and the reward gets every other column.
A row has a name, file:line or the text of its problem, with which a message about the row begins.

    named_rows     the rows of a task: most are generated, gsm8k is fetched, file is your own
    encode_rows    rows with their prompts as token ids
    load_prompts   a run's training rows, of which Prompts.draw encodes what a step uses, and held-out prompts
    epoch_order    the order in which an epoch uses its rows
"""
import contextlib
import csv
import functools
import glob
import gzip
import hashlib
import io
import json
import math
import numbers
import os
import pickle
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch

from configurator import InputError, is_of_library, specs
from options.chat_template import text_of_blocks
from tasks.generate_problems import generated_rows

# The paths of files of rows, also in capitals. The files that come first describe a saved data set.
FILE_KIND = re.compile(r"(?is)(?!(?:.*/)?(?:dataset_infos?|dataset_dict|state)\.json$)"
                       r".*\.(jsonl|ndjson|json|csv|tsv|parquet|arrow)(\.gz)?$")
# The names of splits in the paths of files
SPLIT = re.compile("(?<![a-z])(train|test|val|valid|validation|dev|eval)(?![a-z])")
# Columns of a file that may hold the answer; the first of them that a row has is taken.
ANSWER_COLUMNS = ("answer", "ground_truth", "reward_model.ground_truth", "solution", "reference")
# Columns that may hold the prompt. In the last two the prompt ends before the assistant's last answer.
PROMPT_COLUMNS = ("prompt", "messages", "conversations")
SOURCE_COLUMNS = ("source", "data_source", "dataset")
# These columns, which other trainers read, have to be empty: a run reads text alone.
UNREAD_COLUMNS = "image images video videos audio audios chat_template_kwargs".split()
# The columns that hold a prompt or an answer, that say where a row is from, or that have to be empty
READ_COLUMNS = [*PROMPT_COLUMNS, *ANSWER_COLUMNS, *SOURCE_COLUMNS, *UNREAD_COLUMNS, "reward_model",
                "completion", "tools"]
MESSAGE_ROLES = "system developer user assistant tool".split()
# Other names of these roles, in small letters
ROLE_OF = {"human": "user", "observation": "tool", "function": "tool",
           **dict.fromkeys("gpt chatgpt bing bard bot model function_call".split(), "assistant")}

# ------------------------------------------------------------------------------------------------------------
# rows


def named_rows(s, split):
    """Return the rows of a split, "train" or "eval", as a sequence of pairs (name, row).

    s: settings. The tasks of tasks/generate_problems.py generate train_prompts or eval_prompts distinct
    problems of the difficulty that stands behind the task's name, as in algebra:2; with 0 these are 4,096 for
    "train" and 128 for "eval", or all that the task has if it has fewer. gsm8k and file give this number of
    their rows (see spread), or with 0 all of them. Without an eval_file, task file sets one in eight prompts
    of train_file aside: the rows with these prompts are "eval", the others "train". Raises InputError if
    there are no such rows, or too few distinct problems.
    """
    count = s.eval_prompts
    seed = 0
    if split == "train":
        count = s.train_prompts
        seed = s.seed
    if s.task == "gsm8k":
        return spread(gsm8k_rows(split), count)
    if s.task == "file":
        return spread(split_rows(s, split), count)
    task, _, variant = s.task.partition(":")
    if task == "reasoning_gym":
        # Only the runs that use the package import this.
        from tasks.reasoning_gym import gym_rows
        return gym_rows(variant, split, count, seed)
    difficulty = variant or "1"
    if difficulty not in map(str, range(1, 101)):
        raise InputError(f"task={s.task}: a difficulty is a whole number from 1 to 100, as in algebra:2")
    return generated_rows(task, split, count, seed, int(difficulty))


def gsm8k_rows(split):
    # Returns the Rows of GSM8K (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168) with verl's prompt. The
    # original files are kept in a cache folder.
    file, sha256 = {"train": ("train.jsonl", "17f347dc5147"), "eval": ("test.jsonl", "3730d312f6e3")}[split]
    url = f"https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{file}"
    path = os.path.expanduser(f"~/.cache/gsm8k/{file}")
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with naming(f"gsm8k: {url} cannot be fetched to {path}"):
            torch.hub.download_url_to_file(url, path, sha256, progress=False)
    prompt_format = '{question} Let\'s think step by step and output the final answer after "####".'
    packed = []
    for name, row in file_rows(path, "", "answer", prompt_format=prompt_format):
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        packed.append(pickle.dumps((name, {
            "prompt": row["prompt"], "answer": answer, "source": "gsm8k", "solution": row["answer"]})))
    return Rows(packed)


class Rows:
    """A sequence of pairs (name, row), which are kept as bytes and made anew when they are read: as dicts a
    million rows of 1 KB take four times the memory, on every rank.

    packed: the pairs as bytes. columns: {column: None}; every row that is read has all of them, so that a
    reward gets the same columns at every step. places: {whether rows are held out: their places} of a file
    that is for both splits.
    """

    def __init__(self, packed, columns={}, places={}):
        self.packed = packed
        self.columns = columns
        self.places = places

    def take(self, places):
        """Return the Rows at these places."""
        return Rows([self.packed[place] for place in places], self.columns)

    def __len__(self):
        return len(self.packed)

    def __getitem__(self, place):
        if isinstance(place, slice):
            return self.take(range(len(self))[place])
        name, row = pickle.loads(self.packed[place])
        return name, self.columns | row


def spread(rows, count):
    """Return `count` of the Rows, or all for 0, in their order.

    They are of each source in proportion and from anywhere in the file, because a file may be sorted.
    """
    if not 0 < count < len(rows):
        return rows
    sources = [str(row.get("source")) for _, row in rows]
    # Source after source, but within a source in a random order
    order = sorted(epoch_order(len(rows), 0, 0), key=sources.__getitem__)
    return rows.take(sorted(order[place * len(rows) // count] for place in range(count)))


def split_rows(s, split):
    # Returns the Rows of the user's files that are of this split.
    path = s.train_file
    if split == "eval":
        path = s.eval_file or path
    # With an environment rows need no prompt, because its reset may give one.
    rows = file_rows(path, s.prompt_column, s.answer_column, s.chat, bool(s.environment), s.prompt_format)
    if s.eval_file:
        return rows
    places = rows.places[split == "eval"]
    if not places:
        raise InputError(f"{path}: without an eval_file a hash of the prompt decides which rows are held "
                         f"out, and none of {len(rows)} is for {split}; --eval_file=... names held-out rows, "
                         "which may be those of the same file")
    return rows.take(places)


@functools.lru_cache(maxsize=1)
def file_rows(paths, prompt_column="", answer_column="", chat=True, prompt_optional=False, prompt_format=""):
    # Returns all Rows of the files that a setting names. They are read once for both splits.
    answer_columns = [answer_column] if answer_column else ANSWER_COLUMNS
    packed = []
    columns = {}
    places = {True: [], False: []}                              # of the rows that are held out, and of others
    unanswered = []                                             # the names of rows without an answer
    format_columns = set()
    if prompt_format:
        prompt_column = "prompt"
        # All rows are read once more before, because a row may lack a column that others have.
        for _, row, _ in all_rows(paths):
            format_columns |= row.keys()
    for name, row, source in all_rows(paths):
        with naming(name):
            if prompt_format:
                row["prompt"] = filled_in(prompt_format, format_columns, row)
            if "{system}" in prompt_format:
                row["system"] = None                            # the prompt has it already
            prompt = prompt_of(row, prompt_column, chat, prompt_optional)
            answer = answer_of(row, answer_columns)
            # The columns answer and source stay as they are if there is nothing for them.
            row |= without_null({"prompt": prompt, "answer": answer, "source": source})
            # A row without a prompt is told from others by all of it.
            text = whole_text(prompt) or json.dumps(row, ensure_ascii=False, default=str)
            places[held_out(text)].append(len(packed))
        if answer is None:
            unanswered.append(name)
        packed.append(pickle.dumps((name, row)))
        columns |= dict.fromkeys(row)
    if not packed:
        raise InputError(f"{paths}: no rows")
    if unanswered and (answer_column or len(unanswered) < len(packed)):
        raise InputError(f"{unanswered[0]}: no answer in {' or '.join(answer_columns)}; the columns are "
                         f"{', '.join(columns)}: --answer_column=...")
    return Rows(packed, columns, places)


def held_out(text):
    # Returns whether a file's rows with this prompt are held out, for each seed. Of prompts that differ in a
    # digit or two a checksum, as in generate_problems.py, would hold out whole clumps.
    return hashlib.sha256(text.encode()).digest()[0] % 8 == 0


def all_rows(paths):
    # Yields the rows of the files as triples: a name, a dict in which tools are schemas, and its source, or
    # None if it has none.
    for file, source_of_file in files_of(paths):
        for name, row in read_rows(file):
            with naming(name):
                if isinstance(row, bytes):                      # a line of JSON
                    row = json.loads(row)
                if not isinstance(row, dict):
                    raise InputError("not an object")
                check_text_alone(row)
                if "tools" in row:
                    row["tools"] = tools_of(row["tools"])
            source = source_of_file
            for column in SOURCE_COLUMNS:
                source = source or row.get(column)
            if isinstance(source, list):
                source = ", ".join(map(str, source))
            yield name, row, source


def check_text_alone(row):
    # Raises InputError for a row with anything that is no text, and that the model would have to see.
    for column, value in row.items():
        objects = [item for item in as_list(value) if isinstance(item, dict)]
        # An image or a sound of a hub's data set has these two fields.
        media = any(item.keys() == {"bytes", "path"} for item in objects)
        if media or value and column in UNREAD_COLUMNS:
            raise InputError(f"{column} holds something, but a run reads text alone, and "
                             "chat_template_kwargs is a setting: leave out the row, or the column if the "
                             "text does without it")


def filled_in(prompt_format, columns, row):
    # Returns prompt_format with a row's values in the place of {column}. The values of a list stand in lines
    # of their own.
    def text_of(match):
        if match[1] not in columns:
            return match[0]
        values = as_list(row.get(match[1]))
        # The \0 marks the place of nothing.
        return "\n".join(str(value) for value in values if value is not None) or "\0"

    text = re.sub("{([^{}]+)}", text_of, prompt_format.replace("\\n", "\n"))
    # A line that has become empty is left out, with the empty lines before it.
    text = re.sub(r"(?m)\n*^[ \0]*\0 *$", "", text)
    return text.replace("\0", "").lstrip("\n")


@contextlib.contextmanager
def naming(name):
    # Begins the message of whatever is wrong with a file or a row with its name.
    try:
        yield
    except Exception as error:
        if not is_of_library(error):
            raise
        raise InputError(f"{name}: {error if isinstance(error, ValueError) else repr(error)}") from error


def tools_of(value):
    # Returns a row's tools as JSON schemas in OpenAI's form. value: a list of these or of functions alone, or
    # nothing. The list and its entries may be JSON texts.
    tools = []
    for tool in as_list(from_json(value) or []):
        tool = without_nulls(from_json(tool))
        function = isinstance(tool, dict) and tool.get("function", tool)
        if not isinstance(function, dict) or "name" not in function:
            raise InputError(f"tools must be a list of functions with names, not {value!r:.100}")
        tools.append({"type": "function", "function": function})
    return tools


def prompt_of(row, prompt_column, chat, optional):
    # Returns a row's prompt in the form that encode_rows takes: a string or messages.
    filled = [column for column in PROMPT_COLUMNS if row.get(column) is not None]
    column = prompt_column or (filled or PROMPT_COLUMNS)[0]
    prompt = messages_in(row.get(column))
    if prompt is None:
        if optional:
            return [{"role": "user", "content": ""}]
        raise InputError(f"no column {column}; the columns are {', '.join(row) or 'none'}: "
                         "--prompt_column=...")
    if isinstance(prompt, str) and prompt_column and chat:
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str):
        prompt = [as_message(message) for message in as_list(prompt)]
        if column != "prompt" and prompt and prompt[-1]["role"] == "assistant":
            prompt.pop()                                        # the policy is to find it
        if row.get("system") and prompt and prompt[0]["role"] != "system":
            prompt.insert(0, as_message({"role": "system", "content": row["system"]}))
    if not whole_text(prompt).strip():
        raise InputError("empty prompt")
    return prompt


def messages_in(value):
    """Return a value of a row, or its messages if it is the JSON text of a list of them."""
    if isinstance(value, str) and re.match(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""", value):
        return json.loads(value)
    return value


def as_message(message):
    """Return a message of a file as chat templates expect it: with role and content, and without null, which
    Arrow writes into every field that another message has. The arguments of a call may be a JSON string, and
    are {} where there are none."""
    fields = {}
    if isinstance(message, dict):
        fields = without_nulls(message)
    if "from" in fields:                                        # ShareGPT's form
        fields = {"role": fields.pop("from"), "content": fields.pop("value", "")} | fields
    if "reasoning" in fields:
        fields.setdefault("reasoning_content", fields.pop("reasoning"))
    role = str(fields.get("role")).lower()
    functions = fields.pop("function_call", [])                 # OpenAI's older form has a single one
    if role == "function_call":
        functions = from_json(fields.pop("content", ""))
    calls = [{"type": "function", "function": function} for function in as_list(functions)]
    calls += as_list(fields.get("tool_calls", []))
    if calls:
        fields["tool_calls"] = calls
        fields.setdefault("content", "")
    for call in calls:
        function = isinstance(call, dict) and call.get("function", call)
        if not isinstance(function, dict):
            raise InputError(f"a call must be a JSON object, not {call!r:.100}")
        arguments = from_json(function.get("arguments"))
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise InputError(f"the arguments of a call must be a JSON object, not {arguments!r:.100}")
        function["arguments"] = arguments
    if isinstance(fields.get("content"), list):
        fields["content"] = text_of_blocks(fields["content"])
    fields["role"] = ROLE_OF.get(role, role)
    if fields["role"] not in MESSAGE_ROLES or not isinstance(fields.get("content"), str):
        raise InputError(f"a message needs a role, one of {', '.join(MESSAGE_ROLES)}, and a content, a "
                         f"string or a list of text blocks: {message!s:.100}")
    return fields


def without_nulls(value):
    # Returns a value of a row as JSON has it, without the null that Arrow writes into an object's every field
    # that another object has.
    return json.loads(json.dumps(value, default=date_as_text), object_hook=without_null)


def without_null(fields):
    # Returns the fields that are not None.
    return {key: value for key, value in fields.items() if value is not None}


def date_as_text(value):
    # Messages of a parquet file may hold dates, which JSON does not have. Bytes would not be what they say.
    if isinstance(value, bytes):
        raise InputError(f"a message cannot hold bytes: {value!r:.100}")
    return str(value)


def from_json(value):
    # Returns what a JSON text says, where blank is null, and any other value as it is.
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value.strip() or "null")
    return value


def as_list(value):
    # Returns a list as it is, and any other value in a list.
    if isinstance(value, list):
        return value
    return [value]


def answer_of(row, columns):
    # Returns the answer of a row, which is in the first of the columns that it has: a text, a number, a list
    # of these, or None if it has none of them.
    truths = dict(row)
    if isinstance(row.get("reward_model"), dict):
        truths["reward_model.ground_truth"] = row["reward_model"].get("ground_truth")
    for column in columns:
        truth = messages_in(truths.get(column))
        if isinstance(truth, list) and truth and isinstance(truth[-1], dict):
            truth = as_message(truth[-1])["content"]            # what the last of the messages says
        readable = is_answer(truth)
        # A list holds several right answers. With true and false among them all would be right.
        if isinstance(truth, list):
            readable = truth and all(map(is_answer, truth)) and bool not in map(type, truth)
        if readable:
            return truth
        # What verl's form holds may be anything that a reward understands; then it is no answer.
        if truth is not None and column != "reward_model.ground_truth":
            raise InputError(f"{column} must be text or a finite number, not {truth!r:.100}; a list may hold "
                             "several right ones, but neither true nor false: write a text, such as "
                             '"false, true", if all of them are to be given; a column of another name goes '
                             "to the reward as it is")


def is_answer(value):
    # Returns whether this is a text that says something, or a number other than NaN and infinity.
    if isinstance(value, str):
        return value.strip() != ""
    return isinstance(value, numbers.Number) and abs(value) < math.inf


def files_of(setting):
    # Yields the files that the setting train_file or eval_file stands for, as pairs (name of the file, source
    # of its rows or None): files, folders, patterns and files of the hub, with commas between them, each of
    # them alone or as SOURCE=PATH. Those of a folder or of a pattern are sorted, and have to be of one split.
    # What is no file stays as it is, and read_rows refuses it. An empty setting goes by the name of both.
    sources = set()
    for part in specs(setting) or ["train_file or eval_file"]:
        source, path = re.fullmatch(r"(?s)(?:([\w.-]+)=)?(.*)", part).groups()
        if glob.glob(part, recursive=True):                     # a path that has a = itself
            source = None
            path = part
        if source and source in sources:
            raise InputError(f"{setting}: the source {source} is named twice; a folder or a pattern names "
                             "several files at once")
        sources.add(source)
        path = os.path.expanduser(path)
        matches = []
        if os.path.isdir(path):
            matches = glob.glob(f"{glob.escape(path)}/*")
        elif not os.path.isfile(path):
            matches = glob.glob(path, recursive=True)
        files = sorted(filter(FILE_KIND.match, matches)) or [path]
        start = len(os.path.commonpath(files))
        splits = {tuple(SPLIT.findall(file[start:].lower())) for file in files}
        if len(splits - {()}) > 1:
            raise InputError(f"{part}: files of different splits, and only some of them are to be read: "
                             f"{', '.join(files):.2000}")
        for file in files:
            yield file, source


def read_rows(name):
    # Yields the rows of a file as pairs (name, row); a row of JSONL is its line.
    path = name
    if name.startswith("hf://datasets/"):
        path = hub_file(name)
    kind = FILE_KIND.match(path)
    if not (kind and os.path.isfile(path)):
        raise InputError(f"{name}: no such file of .jsonl, .ndjson, .json, .csv, .tsv, .parquet or .arrow, "
                         "nor a folder or a pattern of such files, which commas separate; SOURCE=PATH names "
                         "the source of its rows")
    ending = kind[1].lower()
    open_file = gzip.open if kind[2] else open
    with naming(name), open_file(path, "rb") as file:
        if ending in ("parquet", "arrow"):
            rows = arrow_rows(file, ending)
        elif ending in ("csv", "tsv"):
            rows = csv_rows(file, ending)
        # There may be a byte order mark, which json reads over.
        elif file.peek(1).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            rows = json.load(file)
        else:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{name}:{number}", line
            return
        for number, row in enumerate(rows, 1):
            yield f"{name}: row {number}", row


def hub_file(name):
    # Returns the path of hf://datasets/OWNER/NAME/FILE in the hub's cache, to which the file is fetched.
    # Only the runs that have such a file import this.
    from huggingface_hub import HfApi, errors, hf_hub_download
    dataset, file = re.match("hf://datasets/([^/]*/?[^/]*)/?(.*)", name).groups()
    with naming(name):
        with contextlib.suppress(errors.EntryNotFoundError):
            if file:
                return hf_hub_download(dataset, file, repo_type="dataset")
        files = ", ".join(HfApi().list_repo_files(dataset, repo_type="dataset"))
        raise InputError(f"no such file; there are {files:.2000}")


def csv_rows(file, ending):
    # Yields the rows of a CSV or TSV file, whose first line names the columns. A cell is a text, or absent if
    # it is empty.
    lines = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True,
                           delimiter="\t" if ending == "tsv" else ",")
    for row in lines:
        if None in row or None in row.values():
            raise InputError(f"line {lines.line_num} has more or fewer cells than the first line")
        yield {column: cell for column, cell in row.items() if cell}


def arrow_rows(file, ending):
    # Yields the rows of a parquet file, or of an Arrow file as the package datasets saves it.
    import pyarrow.parquet                                      # only those who have such a file wait for it
    if ending == "arrow":
        batches = pyarrow.ipc.open_stream(file)
    else:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(1000)
    for batch in batches:
        rows = batch.to_pylist()
        if "float" in str(batch.schema):                        # not in double, which needs no repair
            rows = [as_written(row, batch.schema) for row in rows]
        yield from rows


def as_written(value, kind):
    # Returns a row of the schema `kind`, or a value of Arrow's type `kind`, as it was written. In float16 and
    # float32 0.1 is to be 0.1, and not 0.10000000149.
    if isinstance(value, dict):
        return {field.name: as_written(value[field.name], field.type) for field in kind}
    if isinstance(value, list):
        return [as_written(item, kind.field(0).type) for item in value]
    if isinstance(value, float):
        return float(str(kind.to_pandas_dtype()(value)))
    return value


# ------------------------------------------------------------------------------------------------------------
# prompts


class Prompt(NamedTuple):
    """A row with its prompt as tokens."""
    row: dict
    ids: list               # token ids, including those that the chat template adds
    number: int = 0         # the number of the row in Prompts
    epoch: int = 0          # how many times all rows had been drawn before this prompt was
    begun: int = 0          # how many tokens at the end of ids are the beginning of the completion


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
    for (name, row), ids in zip(rows, encoded):
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

        Of the rows whose messages have the same roles, and calls in the same places, the first is tried, and
        the first of those that have tools.
        """
        s = self.s
        template = str(self.tokenizer.chat_template)
        tried = set()
        for name, row in self.rows:
            prompt = row["prompt"]
            messages = [] if isinstance(prompt, str) else prompt
            tools = row.get("tools")
            kind = bool(tools), *((message["role"], "tool_calls" in message) for message in messages)
            if kind in tried:
                continue
            tried.add(kind)
            # What replies to the model would have no place in other prompts.
            if (s.environment or s.tools) and (tools or not messages or messages[-1]["role"] == "assistant"):
                raise InputError(f"{name}: an environment and tools need prompts that are lists of messages, "
                                 "the last one not the assistant's, and rows without tools")
            render = functools.partial(as_text, self.tokenizer, name, prompt, s.chat, s.system_prompt)
            text = render(tools or self.tools)
            if tools and text == render(None):
                raise InputError(f"{name}: a row's tools need messages and a chat template with a place for "
                                 "them")
            for message in [{"role": "system", "content": s.system_prompt}, *messages]:
                left_out = message["content"].strip() not in text
                # A template may shorten an earlier answer and rewrite what a tool has returned, but it has to
                # write the calls.
                if message["role"] in ("assistant", "tool"):
                    left_out = "tool_calls" in message and "tool_calls" not in template
                if left_out:
                    raise InputError(f"{name}: the chat template leaves out {message!r:.200}")


def load_prompts(tokenizer, settings, tools=None):
    """Return a run's training rows as Prompts, its held-out prompts as a list, and a sentence about both.

    settings: what configure returns. tools: as in encode_rows. The sentence is followed by the first prompt
    as the model reads it, with its answer. Raises InputError where load_split does.
    """
    train_set, fitting, train_note = load_split(tokenizer, settings, "train", tools)
    _, eval_set, eval_note = load_split(tokenizer, settings, "eval", tools)
    return train_set, eval_set, (f"The run trains on {train_note} and is evaluated on {eval_note}.\n"
                                 f"{unread_columns(train_set)}{shown_prompt(tokenizer, fitting[0])}")


def unread_columns(prompts):
    """Return a line that lists the columns of a file's rows which no model reads or learns, or "" if there
    are none. prompts: the Prompts of a split."""
    s = prompts.s
    _, row = prompts.rows[0]
    read = [*READ_COLUMNS, s.prompt_column, s.answer_column]
    if not isinstance(row["prompt"], str):                      # a string has no system message
        read.append("system")
    unread = [column for column in row if column not in read and f"{{{column}}}" not in s.prompt_format]
    if s.task != "file" or not unread:
        return ""
    return (f"The model does not read the columns {', '.join(unread)}; rewards may (--prompt_format puts "
            "columns into the prompt).\n")


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
