"""A reward model scores conversations: a Hugging Face sequence-classification model with one label.

It judges text and not the policy's tokens: its own tokenizer and chat template render the conversation again.
Text of which its tokenizer makes a control token, such as the end of a turn, is broken up first, because
otherwise a policy could write the judge's next turn itself. Each rank has a whole copy of the model, which
waits in host memory while it is not used.
"""
import math

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification

from runtime.chat_template import broken_up
from runtime.check_model import check_loaded, check_model, load_tokenizer, reading


class RewardModel:
    """Loads the reward model in `path` (a folder or hub id); its method `score` scores conversations.

    device: where it computes. dtype: the precision of its weights and its computation. token_budget: the
    largest number of tokens in a batch, padding included. Raises ValueError for a model that is no reward
    model (it has several labels or no trained head), or that names no pad token.
    """

    def __init__(self, path, device, dtype, token_budget):
        check_model(path, "reward_model")
        config, self.tokenizer = AutoConfig.from_pretrained(path), load_tokenizer(path, "reward_model")
        if config.num_labels != 1:
            raise ValueError(f"reward_model={path} has {config.num_labels} labels: a reward model has one")
        # The model reads the score at the last token that is no padding, so the part of the config that its
        # forward reads has to name the pad token.
        text_config = config.get_text_config()
        self.pad_id = getattr(text_config, "pad_token_id", None)
        if self.pad_id is None:
            self.pad_id = text_config.pad_token_id = self.tokenizer.pad_token_id
        if self.pad_id is None:
            raise ValueError(f"reward_model={path}: neither its config nor its tokenizer names a pad token")
        with reading(f"reward_model={path}: its weights"):
            self.model, loading = AutoModelForSequenceClassification.from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
                trust_remote_code=False)
        check_loaded(f"reward_model={path} is not a trained reward model", loading)
        self.model.eval()
        # In bfloat16 scores near 16 would be multiples of 1/8.
        head = getattr(self.model, "score", None) or self.model.classifier
        head.float().register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
        added = self.tokenizer.added_tokens_decoder
        self.control = {number for number, token in added.items() if token.special}
        self.path, self.device, self.token_budget = path, device, token_budget
        self.max_length = getattr(text_config, "max_position_embeddings", math.inf)

    @torch.no_grad()
    def score(self, prompts, completions):
        """Return the score of each completion as the continuation of its prompt, or NaN where there is none.

        prompts: strings or lists of messages. completions: a string for a prompt that is a string, to which
        it is appended as it is, or a list of the messages that follow. A conversation has no score if it is
        too long for the model, has a token that the model does not embed, or if its score is not finite. Raises ValueError if no completion has a score,
        or if its chat template fails.
        """
        ids = [self._encode(prompt, completion) for prompt, completion in zip(prompts, completions)]
        fitting = [i for i, row in enumerate(ids)
                   if len(row) <= self.max_length and max(row, default=0) < self.tokenizer.embedded]
        longest_first, scores = sorted(fitting, key=lambda i: -len(ids[i])), [math.nan] * len(ids)
        self.model.to(self.device)
        while longest_first:
            width = len(ids[longest_first[0]])
            count = max(1, self.token_budget // width)
            batch, longest_first = longest_first[:count], longest_first[count:]
            rows = [torch.tensor(ids[i], device=self.device) for i in batch]
            padded = pad_sequence(rows, True, self.pad_id)                              # [count, width]
            mask = pad_sequence([torch.ones_like(row) for row in rows], True)
            logits = self.model(input_ids=padded, attention_mask=mask).logits           # [count, 1]
            for i, value in zip(batch, logits[:, 0].tolist()):
                scores[i] = value if math.isfinite(value) else math.nan
        self.model.to("cpu")
        if all(map(math.isnan, scores)):
            raise ValueError(f"reward_model={self.path} has no finite score for any completion, such as "
                             f"{completions[0]!r:.500}; it reads at most {self.max_length} tokens")
        return scores

    def _encode(self, prompt, completion):
        if isinstance(prompt, str):
            return self.tokenizer(prompt + self._harmless(completion)).input_ids
        turns = [*prompt, *completion]
        # A completion continues the assistant's message at the end of its prompt, so the two are one turn.
        if prompt[-1]["role"] == "assistant":
            begun, first = prompt[-1]["content"], completion[0]
            turns = [*prompt[:-1], first | {"content": begun + (first.get("content") or "")}, *completion[1:]]
        # What a tool returned may be a list or an object.
        messages = [self._harmless(turn | {"content": str(turn.get("content") or "")}) for turn in turns]
        with reading(f"reward_model={self.path}: a conversation, by its chat template,"):
            return self.tokenizer.apply_chat_template(messages, return_dict=False)

    def _harmless(self, said):
        # A text, or all texts in a message: a policy also writes thoughts, and the arguments of calls.
        if isinstance(said, dict):
            return {self._harmless(key): self._harmless(value) for key, value in said.items()}
        if isinstance(said, list):
            return [*map(self._harmless, said)]
        return broken_up(said, self.tokenizer, self.control, " ") if isinstance(said, str) else said
