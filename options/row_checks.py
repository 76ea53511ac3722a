"""
The check of rows and chat templates that come from others. A run of the tiny model with problems of its own
does not open this file.
"""
from functools import partial

from configurator import InputError
from data import as_text


def check_rows(prompts):
    """Raise InputError for a row of data.Prompts that an environment or the chat template refuses.

    Of the rows whose messages have the same roles, and calls in the same places, the first is tried, and the
    first of those that have tools.
    """
    s = prompts.s
    template = str(prompts.tokenizer.chat_template)
    tried = set()
    for name, row in prompts.rows:
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
        render = partial(as_text, prompts.tokenizer, name, prompt, s.chat, s.system_prompt)
        text = render(tools or prompts.tools)
        if tools and text == render(None):
            raise InputError(f"{name}: a row's tools need messages and a chat template with a place for them")
        for message in [{"role": "system", "content": s.system_prompt}, *messages]:
            # The template writes something else for an image.
            left_out = any(part.strip() not in text for part in message["content"].split("<image>"))
            # A template may shorten an earlier answer and rewrite what a tool has returned, but it has to
            # write the calls.
            if message["role"] in ("assistant", "tool"):
                left_out = "tool_calls" in message and "tool_calls" not in template
            if left_out:
                raise InputError(f"{name}: the chat template leaves out {message!r:.200}")
