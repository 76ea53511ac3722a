"""The rows of the user's files, which --task=file reads. Runs without files do not open this file.

    split_rows   the rows of a split
    file_rows    all rows of the files that a setting names
    files_of     these files
    Rows         rows that are kept as bytes
"""
import functools
import glob
import gzip
import hashlib
import json
import os
import pickle
import re
from types import SimpleNamespace

from configurator import InputError, specs
from data import epoch_order, naming, whole_text

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
# Columns with which a row is not yet plain
FOREIGN_COLUMNS = ["data_source", "dataset", "system", "tools", *UNREAD_COLUMNS]
# The columns that hold a prompt or an answer, that say where a row is from, or that have to be empty
READ_COLUMNS = [*PROMPT_COLUMNS, *ANSWER_COLUMNS, *SOURCE_COLUMNS, *UNREAD_COLUMNS, "reward_model",
                "completion", "tools"]
MESSAGE_ROLES = "system developer user assistant tool".split()


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

    def spread(self, count):
        """Return `count` of the Rows, or all for 0, in their order.

        They are of each source in proportion and from anywhere in the file, because a file may be sorted.
        """
        if not 0 < count < len(self):
            return self
        sources = [str(row.get("source")) for _, row in self]
        # Source after source, but within a source in a random order
        order = sorted(epoch_order(len(self), 0, 0), key=sources.__getitem__)
        return self.take(sorted(order[place * len(self) // count] for place in range(count)))

    def __len__(self):
        return len(self.packed)

    def __getitem__(self, place):
        if isinstance(place, slice):
            return self.take(range(len(self))[place])
        name, row = pickle.loads(self.packed[place])
        return name, self.columns | row


def split_rows(s, split):
    # Returns the Rows of the user's files that are of this split.
    path = s.train_file
    if split == "eval":
        path = s.eval_file or path
    # With an environment rows need no prompt, because its reset may give one.
    rows = file_rows(path, s.prompt_column, s.answer_column, s.chat, bool(s.environment), s.prompt_format,
                     bool(s.images))
    if s.eval_file:
        return rows
    places = rows.places[split == "eval"]
    if not places:
        raise InputError(f"{path}: without an eval_file a hash of the prompt decides which rows are held "
                         f"out, and none of {len(rows)} is for {split}; --eval_file=... names held-out rows, "
                         "which may be those of the same file")
    return rows.take(places)


@functools.lru_cache(maxsize=1)
def file_rows(paths, prompt_column="", answer_column="", chat=True, prompt_optional=False, prompt_format="",
              images=False):
    # Returns all Rows of the files that a setting names. They are read once for both splits.
    form = SimpleNamespace(prompt_column=prompt_column, answer_column=answer_column, chat=chat,
                           prompt_optional=prompt_optional, prompt_format=prompt_format, columns=set(),
                           images=images)
    packed = []
    columns = {}
    places = {True: [], False: []}                              # of the rows that are held out, and of others
    unanswered = []                                             # the names of rows without an answer
    if prompt_format:
        # All rows are read once more before, because a row may lack a column that others have.
        for _, row, *_ in all_rows(paths):
            form.columns |= row.keys()
    # In a plain row these columns are a prompt and an answer already.
    as_named = prompt_column == prompt_format == "" and answer_column in ("", "answer") and not images
    for name, row, source, file in all_rows(paths):
        with naming(name):
            answered = True
            if as_named and is_plain(row):
                if source:
                    row["source"] = source
            else:
                from options.foreign_rows import plain_row
                answered = plain_row(row, source, form, file)
            # A row without a prompt is told from others by all of it.
            text = whole_text(row["prompt"]) or json.dumps(row, ensure_ascii=False, default=str)
            text += "".join(row.get("images", ()))
            places[held_out(text)].append(len(packed))
        if not answered:
            unanswered.append(name)
        packed.append(pickle.dumps((name, row)))
        columns |= dict.fromkeys(row)
    if not packed:
        raise InputError(f"{paths}: no rows")
    if unanswered and (answer_column or len(unanswered) < len(packed)):
        raise InputError(f"{unanswered[0]}: no answer in {answer_column or ' or '.join(ANSWER_COLUMNS)}; the "
                         f"columns are {', '.join(columns)}: --answer_column=...")
    return Rows(packed, columns, places)


def is_plain(row):
    # Returns whether a row has a text or messages of mere text as its prompt, a text or a whole number as its
    # answer, and nothing else that foreign_rows.py reads. A text that begins with a bracket may be a list.
    prompt = row.get("prompt")
    answer = row.get("answer")
    if type(answer) is not int and not is_text(answer) or not row.keys().isdisjoint(FOREIGN_COLUMNS):
        return False
    for column, value in row.items():
        if isinstance(value, (list, dict)) and column != "prompt":
            return False
    if isinstance(prompt, list) and prompt:
        return all(map(is_message, prompt)) and whole_text(prompt).strip() != ""
    return is_text(prompt)


def is_text(value):
    # Returns whether this is a text that says something and that cannot be the JSON text of a list.
    return isinstance(value, str) and value.strip()[:1] not in ("", "[")


def is_message(value):
    # Returns whether this has a role that templates know and a text, and nothing else.
    return (isinstance(value, dict) and value.keys() == {"role", "content"} and value["role"] in MESSAGE_ROLES
            and isinstance(value["content"], str))


def held_out(text):
    # Returns whether a file's rows with this prompt are held out, for each seed. Of prompts that differ in a
    # digit or two a checksum, as in generate_problems.py, would hold out whole clumps.
    return hashlib.sha256(text.encode()).digest()[0] % 8 == 0


def all_rows(paths):
    # Yields the rows of the files: a name, a dict, the source that the setting names or None, and the file.
    for file, source in files_of(paths):
        for name, row in read_rows(file):
            with naming(name):
                if isinstance(row, bytes):                      # a line of JSON
                    row = json.loads(row)
                if not isinstance(row, dict):
                    raise InputError("not an object")
            yield name, row, source, file


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
        from options.file_formats import hub_file
        path = hub_file(name)
    kind = FILE_KIND.match(path)
    if not (kind and os.path.isfile(path)):
        raise InputError(f"{name}: no such file of .jsonl, .ndjson, .json, .csv, .tsv, .parquet or .arrow, "
                         "nor a folder or a pattern of such files, which commas separate; SOURCE=PATH names "
                         "the source of its rows")
    ending = kind[1].lower()
    open_file = gzip.open if kind[2] else open
    with naming(name), open_file(path, "rb") as file:
        if ending not in ("jsonl", "ndjson", "json"):
            from options.file_formats import table_rows
            rows = table_rows(file, ending)
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


def unread_columns(prompts):
    """Return a line that lists the columns of a file's rows which no model reads or learns, or "" if there
    are none. prompts: the Prompts of a split."""
    s = prompts.s
    _, row = prompts.rows[0]
    read = [*READ_COLUMNS, s.prompt_column, s.answer_column]
    if not isinstance(row["prompt"], str):                      # a string has no system message
        read.append("system")
    unread = [column for column in row if column not in read and f"{{{column}}}" not in s.prompt_format]
    if not unread:
        return ""
    return (f"The model does not read the columns {', '.join(unread)}; rewards may (--prompt_format puts "
            "columns into the prompt).\n")
