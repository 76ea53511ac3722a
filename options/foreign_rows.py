"""Makes plain rows of rows in the forms of other trainers and data sets.

A plain row has a prompt, a string or messages of a role and a content, and may have an answer and a source.
The function plain_row makes one of ShareGPT's and verl's rows, of those with tools, lists as JSON texts,
null in every field, and of columns that a setting names. Runs whose rows are plain do not open this file.
"""
import contextlib
import json
import math
import numbers
import os
import re

from configurator import InputError
from data import whole_text
from options.files import ANSWER_COLUMNS, MESSAGE_ROLES, PROMPT_COLUMNS, SOURCE_COLUMNS, UNREAD_COLUMNS

# Other names of the roles, in small letters
ROLE_OF = {"human": "user", "observation": "tool", "function": "tool",
           **dict.fromkeys("gpt chatgpt bing bard bot model function_call".split(), "assistant")}


def plain_row(row, source, form, file):
    """Change a row of a file into a plain one, and return whether it has an answer.

    source: the source that the setting gives its file, or None. form: the settings prompt_column,
    answer_column, chat and prompt_format; prompt_optional, whether the row may lack a prompt; images, whether
    it may show images; and columns, those of all rows if there is a prompt_format. Raises InputError for what
    cannot be read as a row.
    """
    if form.images:
        from options.images import place_images, take_images
        images = take_images(row, [form.prompt_column, *PROMPT_COLUMNS], os.path.dirname(file))
    check_text_alone(row)
    if "tools" in row:
        row["tools"] = tools_of(row["tools"])
    for column in SOURCE_COLUMNS:
        source = source or row.get(column)
    if isinstance(source, list):
        source = ", ".join(map(str, source))
    prompt_column = form.prompt_column
    if form.prompt_format:
        prompt_column = "prompt"
        row["prompt"] = filled_in(form.prompt_format, form.columns, row)
    if "{system}" in form.prompt_format:
        row["system"] = None                                    # the prompt has it already
    prompt = prompt_of(row, prompt_column, form.chat, form.prompt_optional)
    if form.images:
        prompt = place_images(prompt, images)
        row["images"] = images
    answer = answer_of(row, [form.answer_column] if form.answer_column else ANSWER_COLUMNS)
    # The columns answer and source stay as they are if there is nothing for them.
    row |= without_null({"prompt": prompt, "answer": answer, "source": source})
    return answer is not None


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


# A text that begins as a list of messages, or one that ends as a list and has role or from as a later key.
JSON_MESSAGES = (r"""\s*\[\s*\{\s*(["'](role|from|content|value)["']\s*:"""
                 r"""|[^{}]*["'](role|from)["']\s*:.*\]\s*$)""")


def messages_in(value):
    """Return a value of a row, or its messages if it is the JSON text of a list of them."""
    if isinstance(value, str) and re.match(JSON_MESSAGES, value, re.DOTALL):
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
        from options.chat_template import text_of_blocks
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
