"""
PPO's critic: how it is loaded, and the values that it computes. train_ppo.py opens this file.

    load_critic      a Critic under FSDP2, from any model, whose forward returns values
    token_values     computes a critic's values of the sampled tokens of rollouts, without gradient
    mean_over_ranks  the mean of numbers of all ranks, by which PPO whitens advantages
"""
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from model import Network, micro_batches, on_all_ranks, shard
from runtime.model_folder import model_class, read_model, reading


class Critic(Network):
    """A transformer with a scalar head whose forward returns the value of the state before each token."""

    @property
    def head(self):
        return self.hf.score

    def forward(self, batch):
        """MicroBatch -> values [C]. Entry c is read one token before c, so it does not see c.

        The head always computes in float32, because bfloat16 has only three digits for a value.
        """
        hidden = self.hidden_states(batch).float()
        values = hidden @ self.head.weight[0].float() + self.head.bias.float()
        if batch.cut:
            return batch.cut.join(values)
        return values

    def by_transformers(self, ids):
        """Return the decoder's hidden states of all tokens of a sequence but the last, by transformers,
        [L - 1, H]. A new head would return 0 for any of them."""
        return self.decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]

    def by_training(self, batch):
        """Return the same where the sampled tokens of a MicroBatch are predicted, [C, H]."""
        return self.hidden_states(batch)


class ValueHead(PreTrainedModel):
    """The head of a critic, to be read from a folder. If the folder has no such head, its weights are 0."""

    def __init__(self, config):
        super().__init__(config)
        self.score = nn.Linear(config.get_text_config().hidden_size, 1)
        self.post_init()

    def _init_weights(self, module):
        for parameter in module.parameters(recurse=False):
            nn.init.zeros_(parameter)


def load_critic(path, mesh, dtype, gradient_checkpointing=False, torch_compile=False, sequence_group=None):
    """Return a Critic from a folder or hub id. A head that the folder lacks starts at 0.

    transformers' class for token classification reads its checkpoints as well, if the family has one.
    """
    label = f"critic_model={path}"

    def read():
        with reading(f"{label}: its config"):                    # a run without a critic saves none
            config = AutoConfig.from_pretrained(path, num_labels=1)
        hf = read_model(label, model_class(config), path, config, has_head=False)
        hf.score = read_model(label, ValueHead, path, config, may_lack=["score.weight", "score.bias"]).score
        return Critic(hf)

    critic = on_all_ranks(label, read, sequence_group)
    return shard(critic, mesh, dtype, gradient_checkpointing, torch_compile)


@torch.no_grad()
def token_values(critic, rollouts, chosen, token_budget):
    """Return a critic's values of the states before the sampled tokens: {s: [len]}. A collective."""
    values = {}
    for batch in micro_batches(critic, rollouts, chosen, token_budget):
        batch.put(critic(batch), values)
    critic.reshard()
    return values


def mean_over_ranks(values):
    """Return the mean over all ranks of the values that are not NaN, in float64; 0 if there are none.
    A collective."""
    values = torch.as_tensor(values, dtype=torch.float64)
    sums = torch.stack([values.nansum(), (~values.isnan()).double().sum()]).cpu()
    dist.all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1)).item()
