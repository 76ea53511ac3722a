"""A reward model scores conversations: a Hugging Face sequence-classification model with one label.

It judges text and not the policy's tokens: its own tokenizer and chat template render the conversation again.
Text of which its tokenizer makes a control token, such as the end of a turn, is broken up first, because
otherwise a policy could write the judge's next turn itself. Each rank has a whole copy of the model, which
waits in host memory while it is not used.
"""
import math
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification

from configurator import InputError, reading
from options.chat_template import broken_up
from rewards import Result
from runtime.model_folder import check_loaded, check_model, load_tokenizer


class RewardModel:
    """Loads the reward model in `path` (a folder or hub id); its method `score` scores conversations.

    device: where it computes. dtype: the precision of its weights and its computation. token_budget: the
    largest number of tokens in a batch, padding included. Raises InputError for a model that is no reward
    model (it has several labels or no trained head), or that names no pad token.
    """

    def __init__(self, path, device, dtype, token_budget):
        check_model(path, "reward_model")
        self.path = path
        self.device = device
        self.token_budget = token_budget
        self.tokenizer = load_tokenizer(path, "reward_model")
        added = self.tokenizer.added_tokens_decoder.items()
        control_ids = {number for number, token in added if token.special}
        # A policy writes not only the content of a message, but also thoughts and the arguments of calls.
        self._harmless = partial(broken_up, tokenizer=self.tokenizer, control_ids=control_ids, mark=" ")
        config = AutoConfig.from_pretrained(path)
        if config.num_labels != 1:
            raise InputError(f"reward_model={path} has {config.num_labels} labels: a reward model has one")
        # The model reads the score at the last token that is no padding, so the part of the config that its
        # forward reads has to name the pad token.
        text_config = config.get_text_config()
        if getattr(text_config, "pad_token_id", None) is None:
            text_config.pad_token_id = self.tokenizer.pad_token_id
        self.pad_id = text_config.pad_token_id
        if self.pad_id is None:
            raise InputError(f"reward_model={path}: neither its config nor its tokenizer names a pad token")
        self.max_length = getattr(text_config, "max_position_embeddings", math.inf)
        with reading(f"reward_model={path}: its weights"):
            self.model, loading = AutoModelForSequenceClassification.from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
                trust_remote_code=False)
        check_loaded(f"reward_model={path} is not a trained reward model", loading)
        self.model.eval()
        # In bfloat16 scores near 16 would be multiples of 1/8.
        head = getattr(self.model, "score", None) or self.model.classifier
        head.float().register_forward_pre_hook(in_float32)

    def __call__(self, rollouts, columns):
        """Return the scores of rollouts as a source of rewards.Scorer. A NaN leaves its rollout unscored."""
        results = []
        for value in self.score(columns["prompts"], columns["completions"]):
            results.append(Result({"reward_model": value}, unscored=math.isnan(value)))
        return [("reward_model", results)]

    @torch.no_grad()
    def score(self, prompts, completions):
        """Return the score of each completion as the continuation of its prompt, or NaN if it has none.

        prompts: strings or lists of messages. completions: a string for a prompt that is a string, to which
        it is appended as it is, or a list of the messages that follow. A conversation has no score if it is
        too long for the model, has a token that the model does not embed, or if its score is not finite.
        Raises InputError if no completion has a score, or if the chat template fails.
        """
        ids = [self._encode(prompt, completion) for prompt, completion in zip(prompts, completions)]
        fitting = [i for i, row in enumerate(ids)
                   if len(row) <= self.max_length and max(row, default=0) < self.tokenizer.embedded]
        fitting.sort(key=lambda i: len(ids[i]), reverse=True)
        scores = [math.nan] * len(ids)
        self.model.to(self.device)
        while fitting:
            width = len(ids[fitting[0]])
            count = max(1, self.token_budget // width)
            batch = fitting[:count]
            del fitting[:count]
            rows = [torch.tensor(ids[i], device=self.device) for i in batch]
            padded = pad_sequence(rows, True, self.pad_id)                              # [count, width]
            mask = pad_sequence([torch.ones_like(row) for row in rows], True)
            logits = self.model(input_ids=padded, attention_mask=mask).logits           # [count, 1]
            for i, value in zip(batch, logits[:, 0].tolist()):
                if math.isfinite(value):
                    scores[i] = value
        self.model.to("cpu")
        if all(map(math.isnan, scores)):
            raise InputError(f"reward_model={self.path} has no finite score for any completion, such as "
                             f"{completions[0]!r:.500}; it reads at most {self.max_length} tokens")
        return scores

    def _encode(self, prompt, completion):
        # Returns the token ids of a conversation.
        if isinstance(prompt, str):
            return self.tokenizer(prompt + self._harmless(completion)).input_ids
        turns = [*prompt, *completion]
        if prompt[-1]["role"] == "assistant":
            # The completion continues the assistant's message at the end of its prompt: they are one turn.
            *before, begun = prompt
            first, *after = completion
            content = begun["content"] + (first.get("content") or "")
            turns = [*before, first | {"content": content}, *after]
        # What a tool returned may be a list or an object.
        messages = [self._harmless(turn | {"content": str(turn.get("content") or "")}) for turn in turns]
        with reading(f"reward_model={self.path}: a conversation, by its chat template,"):
            return self.tokenizer.apply_chat_template(messages, return_dict=False)


def in_float32(head, inputs):
    # Returns the inputs of the head, a tuple of one tensor, in float32.
    return (inputs[0].float(),)
