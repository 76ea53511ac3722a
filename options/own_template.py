"""
A chat template of the user's own, and arguments for a template. A run opens this file with chat_template or
chat_template_kwargs.
"""
import functools
import json
from pathlib import Path

from configurator import InputError, reading


def apply_settings(tokenizer, settings):
    """Give a tokenizer the template and the arguments that the settings name.

    Raises InputError if they cannot be read, or if the template does not read an argument.
    """
    if settings.chat_template:
        with reading(f"chat_template={settings.chat_template}"):
            tokenizer.chat_template = Path(settings.chat_template).expanduser().read_text("utf-8-sig")
    label = f"chat_template_kwargs={settings.chat_template_kwargs}"
    with reading(label):
        template_kwargs = json.loads(settings.chat_template_kwargs or "{}")
    if not isinstance(template_kwargs, dict):
        raise InputError(f"{label} is no JSON object")
    for name in template_kwargs:
        if name not in str(tokenizer.chat_template):
            raise InputError(f"chat_template_kwargs: the chat template reads no {name}")
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **template_kwargs)
