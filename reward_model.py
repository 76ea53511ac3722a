"""A reward model: a Hugging Face sequence-classification model with one label scores prompt and completion.

It judges text, not the policy's tokens: the conversation is written again in its own chat template, in its
own tokens. Each rank has a whole copy of it, which waits in host memory while it is not used.
"""
import math

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from model import check_model


class RewardModel:
    """score(rows, texts) -> a float for each completion, by the model in `path` (a folder or hub id).

    Raises ValueError for a model that is none (several labels, no trained head), or whose tokenizer has more
    tokens than it embeds. dtype: of weights and computation. token_budget: tokens in a batch, with padding.
    """

    def __init__(self, path, device, dtype, token_budget):
        check_model(path, "reward_model")
        config, self.tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        if config.num_labels != 1:
            raise ValueError(f"reward_model={path} has {config.num_labels} labels: a reward model has one")
        text_config = config.get_text_config()  # the one that the model's own forward reads
        embedded = text_config.vocab_size
        if len(self.tokenizer) > embedded:
            raise ValueError(f"reward_model={path}: its tokenizer has {len(self.tokenizer)} tokens, but its "
                             f"embedding only {embedded}: not the tokenizer that it was trained with")
        if getattr(text_config, "pad_token_id", None) is None:      # a score is read at the last other token
            text_config.pad_token_id = self.tokenizer.pad_token_id
        if text_config.pad_token_id is None:
            raise ValueError(f"reward_model={path}: neither its config nor its tokenizer names a pad token")
        self.model, loading = AutoModelForSequenceClassification.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True)
        if loading["missing_keys"]:
            raise ValueError(f"reward_model={path}: no {', '.join(sorted(loading['missing_keys']))} in its "
                             "weights: not a trained reward model")
        self.model.eval()
        self.path, self.device, self.token_budget = path, device, token_budget
        self.pad_id = text_config.pad_token_id
        self.max_length = getattr(text_config, "max_position_embeddings", math.inf)

    @torch.no_grad()
    def score(self, rows, texts):
        """The score of each completion text as the answer to its row's prompt; NaN where there is none.

        A string prompt is continued by the text as it is. A conversation has none that is too long for the
        model, or whose score is not finite. Raises ValueError if no completion has one, and for messages if
        the tokenizer has no chat template.
        """
        ids = [self._encode(row["prompt"], text) for row, text in zip(rows, texts)]
        longest_first = sorted((i for i in range(len(ids)) if len(ids[i]) <= self.max_length),
                               key=lambda i: len(ids[i]), reverse=True)
        scores = [math.nan] * len(ids)
        self.model.to(self.device)
        while longest_first:
            width = len(ids[longest_first[0]])
            count = max(1, self.token_budget // width)
            batch, longest_first = longest_first[:count], longest_first[count:]
            padding = [width - len(ids[i]) for i in batch]
            padded = [ids[i] + n * [self.pad_id] for i, n in zip(batch, padding)]
            mask = [(width - n) * [1] + n * [0] for n in padding]                       # [count, width]
            logits = self.model(input_ids=torch.tensor(padded, device=self.device),
                                attention_mask=torch.tensor(mask, device=self.device)).logits
            for i, value in zip(batch, logits[:, 0].tolist()):                          # [count, 1]
                scores[i] = value if math.isfinite(value) else math.nan
        self.model.to("cpu")
        if all(map(math.isnan, scores)):
            raise ValueError(f"reward_model={self.path} has no finite score for any completion, such as "
                             f"{texts[0][:500]!r}; it reads at most {self.max_length} tokens")
        return scores

    def _encode(self, prompt, text):
        if isinstance(prompt, str):
            return self.tokenizer(prompt + text).input_ids
        if self.tokenizer.chat_template is None:
            raise ValueError(f"reward_model={self.path}: the prompts are messages, and its tokenizer has no "
                             "chat template")
        return self.tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": text}],
                                                  return_dict=False)
