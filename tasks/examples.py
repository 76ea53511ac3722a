"""
Rows with their answers as tokens, which train_sft.py trains on.

An example is a turn of the assistant behind all that comes before it, as a rollout.Rollout that nobody
sampled. So examples are packed, dealt to ranks and computed as rollouts are, and in a packed row the turns of
a conversation share the tokens with which they begin.

    load_examples   the examples of the rows of a split
    examples_of     those of a row
    answer_of       what the assistant says in a row
"""
from functools import partial

import data
from rollout import Rollout


def load_examples(player, split):
    """Return the Prompts of a split, a list of those that are encoded, and a list of lists: the examples of
    each row.

    The first two are data.load_split's. All rows are encoded at once, and those that have more than
    max_prompt_length + max_completion_length tokens are left out. player: the run's episodes.Player, which
    has settings, tokenizer, end tokens and tools. split: "train" or "eval". Raises ValueError where
    data.load_split and examples_of do, with the name of the row, and if no row is left.
    """
    s = player.settings
    prompts, encoded, _ = data.load_split(player.tokenizer, s, split, player.tools)
    examples = []
    for name, row in prompts.rows:
        with data.naming(name):
            turns = examples_of(row, player)
        if max(len(r.ids) for r in turns) <= s.max_prompt_length + s.max_completion_length:
            examples.append(turns)
    if not examples:
        raise ValueError(f"max_completion_length={s.max_completion_length}: each of {len(prompts.rows)} "
                         f"{split} rows has more tokens than this and max_prompt_length together")
    return prompts, encoded, examples


def examples_of(row, player):
    """Return the examples of a row, as a list. player: as in load_examples.

    A turn is what the chat template adds when the turn is put behind the messages before it, up to its end
    token. So a model learns it behind the tokens behind which it will have to find it, also where the
    template drops the thoughts of a turn that others follow. A prompt that is a string, that chat=False makes
    one, or that ends with the beginning of an answer, is followed by the answer as it stands and by the first
    of the eos_ids. Raises ValueError if answer_of does, and if the template leaves out a part of a turn or
    its end token, or changes what is before the turn.
    """
    s = player.settings
    tokenizer = player.tokenizer
    prompt = row["prompt"]
    answer, whole = answer_of(row, s)
    if whole:
        answer = answer[-1:]
    if isinstance(prompt, str) or not s.chat or prompt[-1]["role"] == "assistant":
        [encoded] = data.encode_rows(tokenizer, [("prompt", row)], s.chat, s.system_prompt)
        ids = tokenizer(data.whole_text(answer), add_special_tokens=False).input_ids + player.eos_ids[:1]
        return [Rollout.single(encoded.ids, ids, [0.0] * len(ids), "stop")]
    if s.system_prompt:
        prompt = [{"role": "system", "content": s.system_prompt}, *prompt]
    messages = [*prompt, *answer]
    render = partial(tokenizer.apply_chat_template, tools=player.tools, return_dict=False)
    examples = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < len(prompt) and not whole:
            continue
        before = render(messages[:number], add_generation_prompt=True)
        after = render(messages[:number + 1])
        while after and after[-1] not in player.eos_ids:
            after.pop()
        turn = after[len(before):]
        if after != before + turn or message["content"].strip() not in tokenizer.decode(turn):
            raise ValueError("the chat template does not say which tokens are the assistant's: behind "
                             f"{tokenizer.decode(before)[-200:]!r} there should be "
                             f"{message['content']!r:.300} and an end token, and with these it writes "
                             f"{tokenizer.decode(after)[-500:]!r}")
        examples.append(Rollout.single(before, turn, [0.0] * len(turn), "stop"))
    return examples


def answer_of(row, s):
    """Return the messages in the column that holds a row's answer, and whether these are the row's whole
    conversation. In this case the row teaches all that the assistant says in it. Raises ValueError without an
    answer."""
    for column in ("completion", "messages", "conversations", s.answer_column, "solution", "answer"):
        answer = row.get(column)
        if data.is_answer(answer):
            answer = [{"role": "assistant", "content": str(answer)}]
        if isinstance(answer, list):
            messages = [data.as_message(message) for message in answer]
            if messages[-1]["role"] == "assistant":
                return messages, column in data.PROMPT_COLUMNS
    raise ValueError("there is nothing to learn: no messages end with the assistant's, and there is no "
                     f"completion, solution or answer; the columns are {', '.join(row)}")
