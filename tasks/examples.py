"""
Rows with worked answers, as the tokens that train_sft.py trains on.

An example is a turn of the assistant together with everything that comes before it. It is a rollout.Rollout,
although nobody sampled it, so examples are packed, dealt to ranks and computed as rollouts are. In a packed
row the turns of a conversation share the tokens with which all of them begin.

    load_examples   the examples of the rows of a split
    draw            the examples that a step learns
    examples_of     those of a row
    answer_of       what the assistant says in a row
"""
from functools import partial

from configurator import InputError
import data
from options.files import Rows, is_message, is_text
from rollout import Rollout

# Fields of a message with which other trainers say that a turn is not learned, by 0 or false
MARKS = "weight train training trainable loss loss_mask".split()


def load_examples(sampler, split):
    """Return the Prompts of a split, a list of encoded prompts, and for each row a list of its examples.

    The first two come from data.load_split. For the third all rows are encoded at once. The list of a row of
    more than max_prompt_length + max_completion_length tokens is empty. sampler: the run's rollout.Sampler,
    which has settings, tokenizer, end tokens and tools. split: "train" or "eval". Raises InputError where
    data.load_split and examples_of do, with the name of the row, and if no row is left.
    """
    s = sampler.settings
    prompts, encoded, _ = data.load_split(sampler.tokenizer, s, split, sampler.tools)
    rows = prompts.rows
    if isinstance(rows, Rows):
        rows = Rows(rows.packed)                           # without the columns that only others have
    longest = s.max_prompt_length + s.max_completion_length
    examples = []
    for name, row in rows:
        with data.naming(name):
            turns = examples_of(row, sampler)
        if any(len(r.ids) > longest for r in turns):
            turns = []
        examples.append(turns)
    if not any(examples):
        raise InputError(f"max_completion_length={s.max_completion_length}: each of {len(prompts.rows)} "
                         f"{split} rows has more tokens than this and max_prompt_length together, or nothing "
                         "to learn")
    return prompts, encoded, examples


def draw(rows, position, count, seed):
    """Return the examples of the next `count` rows that have any, and the new position, as Prompts.draw does.

    rows: the examples of each row of the data, so the position counts rows of the data as well.
    """
    drawn = []
    while len(drawn) < count:
        epoch, place = divmod(position, len(rows))
        position += 1
        examples = rows[data.epoch_order(len(rows), epoch, seed)[place]]
        if examples:
            drawn.append(examples)
    return sum(drawn, []), position


def examples_of(row, sampler):
    """Return the examples of a row, as a list. sampler: as in load_examples.

    The tokens of a turn are those that the chat template adds, up to an end token, when the turn is appended
    to the messages before it. So the model learns a turn after the very tokens that it will have to continue,
    even if the template drops the thoughts of a turn once other messages follow.

    A prompt may also be a string, become one by chat=False, or end with the beginning of an answer. The
    answer then follows it as it stands, with the first of the eos_ids, and of a whole conversation only the
    last answer is learned.

    A turn that one of MARKS takes out is not learned, and a row of such turns has no examples. A row that
    consists of a text alone is learned from its second token on.

    Raises InputError if answer_of does, and if the template leaves out a part of a turn or its end token, or
    changes what is before the turn.
    """
    s = sampler.settings
    tokenizer = sampler.tokenizer
    prompt = row["prompt"]
    answer, whole = answer_of(row, s)
    count = len(answer)                                         # of the messages from which turns are learned
    if whole:
        if prompt[len(prompt) - count + 1:] != answer[:-1]:
            raise InputError(f"the prompt {prompt!r:.200} is not what comes before the last answer in the "
                             "row's messages: --prompt_column=messages takes it from there")
        answer = answer[-1:]
    if not answer:                                              # a text alone
        prompt = row[s.prompt_column]
        row = row | {"prompt": prompt}
    if isinstance(prompt, str) or not s.chat or prompt[-1]["role"] == "assistant":
        if not all(map(is_learned, answer[-1:])):
            return []
        [encoded] = data.encode_rows(tokenizer, [("prompt", row)], s.chat, s.system_prompt)
        ids = tokenizer(data.whole_text(answer), add_special_tokens=False).input_ids + sampler.eos_ids[:1]
        start = len(encoded.ids) if answer else 1
        return [example(encoded.ids + ids, start, row)]
    messages = [*prompt, *answer]
    if s.system_prompt:
        messages.insert(0, {"role": "system", "content": s.system_prompt})
    render = partial(tokenizer.apply_chat_template, tools=row.get("tools") or sampler.tools, tokenize=False)
    numbers = range(len(messages) - count, len(messages))
    return [example_of_turn(messages[:number + 1], sampler, render, row) for number in numbers
            if is_learned(messages[number])]


def example_of_turn(messages, sampler, render, row):
    # Returns the example that teaches the last of the messages. render: the chat template with its tools.
    tokenizer = sampler.tokenizer
    *others, message = messages
    texts = [render(others, add_generation_prompt=True), render(messages)]
    before, after = tokenizer(texts, add_special_tokens=False).input_ids
    while after and after[-1] not in sampler.eos_ids:
        after.pop()
    # The tokens may spell the content in another way, as where the tokenizer normalises.
    written = texts[1][len(texts[0]):]
    right = after[:len(before)] == before and message["content"].strip() in written
    # A template leaves out what it does not know. A field is lost if the text is the same without it.
    for key in ("tool_calls", "reasoning_content", "thinking"):
        shorter = dict(message)
        field = shorter.pop(key, None)
        if str(field or "").strip() and render([*others, shorter]) == texts[1]:
            right = False
    if not right:
        raise InputError("the chat template does not say which tokens are the assistant's: after "
                         f"{tokenizer.decode(before)[-200:]!r} it should write {message!r:.300} and an "
                         f"end token, but the whole text is {tokenizer.decode(after)[-500:]!r}")
    ids = before
    if row.get("images"):
        from options.images import MARK, with_images
        count = data.whole_text(others).count(MARK)             # the turns that follow may show more
        row = row | {"images": row["images"][:count]}
        if count:
            ids = with_images(tokenizer, "prompt", row, texts[0], before).ids
    return example(ids + after[len(before):], len(ids), row)


def example(ids, start, row):
    # Returns a rollout of these tokens, of which those from the place `start` on are learned. row: that whose
    # images it shows.
    learned = ids[start:]
    turn = Rollout.single(ids[:start], learned, [0.0] * len(learned), "stop")
    turn.row = row
    return turn


def is_learned(message):
    # Returns whether this is a turn of the assistant that none of MARKS takes out.
    return message["role"] == "assistant" and all(message.get(mark, 1) for mark in MARKS)


def answer_of(row, s):
    """Return the messages in the column that holds a row's answer, and whether these are the row's whole
    conversation, in which the row teaches all that the assistant says. A row of nothing but a text has no
    messages: it is learned as it is. Raises InputError without an answer."""
    text = row.get(s.prompt_column)
    conversations = [s.prompt_column, "messages", "conversations"]
    columns = ["completion", *conversations]
    if "completion" not in row:                                 # a mere answer is no substitute for it
        columns += [s.answer_column, "solution", "answer"]
    for column in columns:
        # The messages of a column `prompt` are no conversation with an answer at its end.
        if column == "prompt" or row.get(column) is None:
            continue
        messages = messages_of(row[column], text)
        if messages and messages[-1]["role"] == "assistant":
            return messages, column in conversations or messages[0]["role"] != "assistant"
    if isinstance(text, str) and s.prompt_column in ("text", s.answer_column):
        return [], False
    raise InputError("there is nothing to learn: no messages end with the assistant's, and there is no "
                     f"completion, solution or answer; the columns are {', '.join(row)}")


def messages_of(value, prompt):
    # Returns the messages in a column. An answer is a turn of the assistant, if it is not the prompt itself.
    if not is_text(value) and not (isinstance(value, list) and all(map(is_message, value))):
        from options.foreign_rows import as_message, is_answer, messages_in
        value = messages_in(value)
        if isinstance(value, list):
            value = [*map(as_message, value)]
        elif not is_answer(value):
            return []
    if isinstance(value, list):
        return value
    if value == prompt:
        return []
    return [{"role": "assistant", "content": str(value)}]
