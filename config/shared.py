"""
Settings that all training scripts share and few people change. A script takes them in by
`from config.shared import *` as if they stood in its own block; --help lists them, --key=value sets them.
"""
# ------------------------------------------------------------------------------------------------------------
from config.sampling import *  # prompts, sampling, reward, episodes
# data and reward
train_prompts = 0               # rows to generate or to take; 0 generates 4096, or takes all not held out
eval_prompts = 128              # held-out prompts, over all ranks; 0 generates 128, or takes all of them
reward_model = ""               # a folder or hub id of a sequence-classification model with one label
# engine
vllm_gpu_memory_utilization = 0.4  # fraction of the GPU's memory that vLLM may take while it is awake
vllm_tensor_parallel_size = 1   # ranks that share an engine; with 1, each rank has its own
logprob_gap = 0.0               # nats: the run stops if the mean |trainer - engine| is larger than this, or
                                # |mean of trainer - engine| than half of it. In float32, 0 stands for 1e-3.
                                # In 16 bits it stands for 0.15 in the first step, and in later steps for
                                # three times the first step's mean, but at least for 0.05
# training
lora_rank = 0                   # train adapters of this rank and nothing else, at ten times the learning
                                # rate (docs/lora.md); 0 trains all weights
lora_from = ""                  # begin with the adapter in this folder, in PEFT's form; lora_rank is its rank
offload_base = False            # keep the base of adapters in host memory: each layer comes when it computes
optimizer = "adamw"             # the policy's: adamw, or sgd, which has no moments and so takes 8 bytes per
                                # parameter less (docs/recipes.md); PPO's critic keeps adamw
warmup_steps = 5                # the learning rate rises linearly, from learning_rate / warmup_steps
lr_decay = "linear"             # after that: constant, or a linear or cosine fall to 0 at max_steps
weight_decay = 0.0              # an update takes learning_rate * weight_decay of each trained weight off it
adam_beta1 = 0.9                # AdamW's mean of the gradients keeps this part of itself in an update,
adam_beta2 = 0.95               # and its mean of their squares this part. PPO's critic has all three as well
grad_clip = 1.0                 # largest norm of the gradient; 0 does not clip the gradient
dtype = "auto"                  # float32, bfloat16, float16 (with a loss scale), or auto: bfloat16 on CUDA;
                                # master weights are float32
spread_masters = True           # before a run in bfloat16, move each trained master weight by less than
                                # bfloat16 can show, so that small steps change some of the weights that it
                                # computes with (docs/measured/speed.md); adapters never need it
torch_compile = False           # compile the layers; docs/measured/speed.md says what that saved on an H100
gradient_checkpointing = False  # recompute activations in the backward pass: half the memory, a third slower
sequence_parallel_size = 1      # ranks that each hold a part of every micro-batch, for long sequences
shard_ranks = 0                 # ranks that share a copy of the weights, such as a node's; with 0, all ranks
offload_optimizer = False       # keep Adam's moments in host memory between updates, 8 bytes per parameter
timeout = 3600.0                # seconds after which a rank that stands still stops the run; with 0, never
# evaluation, checkpoints and output
eval_interval = 10              # in steps; the first and the last model are always evaluated; with 0 no other
eval_samples = 4                # completions per held-out prompt: k in mean@k, pass@k, maj@k
eval_temperature = -1.0         # that of evaluations; 0 is greedy, and -1 is the temperature of the training
eval_top_p = -1.0               # and so for these three: -1 takes the value without eval_
eval_top_k = -1
eval_min_p = -1.0
best_by = ""                    # the figure that is largest at the best checkpoint, such as
                                # eval/SOURCE/pass@4; if empty, eval/mean@k. train_sft.py also takes
                                # eval/token_loss, which is smallest at the best checkpoint, and goes by it
                                # if it scores no completions
save_interval = 20              # in steps; the last model is always saved; with 0 no other
keep_checkpoints = 2            # how many of the newest to keep; of those that were saved, the one with the
                                # best evaluation is also kept
save_rollouts = False           # write all rollouts of each step to rollouts/ in the run's folder, as parquet
                                # files (docs/metrics.md)
# ------------------------------------------------------------------------------------------------------------
