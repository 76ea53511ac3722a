"""
Settings that all training scripts share and few people change. A script takes them in by
`from settings import *` as if they stood in its own block; --help lists them, --key=value sets them.
"""
# ------------------------------------------------------------------------------------------------------------
# data and reward
train_prompts = 0               # rows to generate or to take; 0: 4096 generated, or all that are not held out
eval_prompts = 128              # held-out prompts, over all ranks; 0: 128 generated, or all that are held out
difficulty = 1                  # of generated problems: 1 suits the tiny model, 3 a model of 1 B parameters
chat = True                     # apply the chat template to messages; False: join them, for base models
system_prompt = ""              # put before every message prompt, for example to ask for \boxed{}
reward_timeout = 10.0           # seconds for a batch; if it takes longer, for each completion alone. 0: none
reward_step_timeout = 600.0     # seconds for a step's completions on a rank; those left score 0. 0: no limit
reward_model = ""               # a folder or hub id of a sequence-classification model with one label
reward_model_weight = 1.0       # weight of its score
reward_weight = 1.0             # weight of the reward where there is a reward model as well; 0: only logged
# episodes: docs/episodes.md
environment = ""                # file.py:Class; empty: an answer is one turn and nothing answers it
max_turns = 8                   # of an episode; max_completion_length counts all of them and what is inserted
environment_workers = 0         # threads for environments; 0: none, and only then a run repeats bit for bit
environment_timeout = 10.0      # seconds for one call of an environment; 0: no limit
# engine
vllm_gpu_memory_utilization = 0.4  # share of the GPU's memory that vLLM may take while it is awake
vllm_tensor_parallel_size = 1   # ranks that share an engine; 1: each rank has its own
logprob_gap = 0.0               # nats: the run stops if the mean |trainer - engine| is larger;
                                # 0: 1e-3, or 0.05 in bfloat16
# training
dtype = "auto"                  # float32, bfloat16; auto: bfloat16 on CUDA. Master weights are always float32
float32_head = True             # with bfloat16: compute logits in float32 in trainer and engine
gradient_checkpointing = False  # recompute activations in the backward pass: half the memory, a third slower
sequence_parallel_size = 1      # ranks that hold a part each of every micro-batch, for long ones; 1: whole
offload_optimizer = False       # keep Adam's moments in host memory between updates, 8 bytes per parameter
timeout = 3600.0                # seconds after which a rank that stands still stops the run; 0: never
max_skipped_updates = 5         # the run stops after this many updates in a row whose gradient is not finite
# output
keep_checkpoints = 2            # how many of the newest to keep; the best saved at an evaluation is also kept
sample_interval = 20            # steps between tables of sample completions on the console
# ------------------------------------------------------------------------------------------------------------
