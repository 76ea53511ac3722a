"""
Checks that refuse settings before a model is loaded. Each message names the setting.

They catch mistakes, and nothing else depends on them. A script of your own may drop settings; the rules that
read one of these are then left out.
"""
import inspect
from importlib.util import find_spec

from configurator import check, given

POSITIVE = """num_generations prompts_per_step max_completion_length token_budget updates_per_step num_epochs
    max_steps eval_samples keep_checkpoints vllm_tensor_parallel_size vllm_gpu_memory_utilization samples
    top_p rollout_ranks sequence_parallel_size steps batch_size""".split()
# Settings of your own may be negative.
NOT_NEGATIVE = """learning_rate critic_learning_rate warmup_steps critic_warmup_steps grad_clip temperature
    top_k epsilon epsilon_high correction_low correction_high kl_coef entropy_coef value_clip lam
    max_prompt_length max_turns max_environments max_num_gen_batches overlong_buffer max_staleness
    train_prompts eval_prompts eval_interval save_interval lora_rank shard_ranks logprob_gap timeout
    call_timeout call_workers show""".split()
SHARES = "lam top_p vllm_gpu_memory_utilization harder quick".split()
CHOICES = {"engine": ("auto", "vllm", "hf"), "dtype": ("auto", "float32", "bfloat16", "float16"),
           "lr_decay": ("constant", "linear", "cosine"), "old_logprobs": ("trainer", "engine"),
           "reward_errors": ("stop", "unscored")}
# Defaults of the scripts that suit the tiny model, whose config says so in `suits`, and no larger one.
SUITS_TINY = {"learning_rate": 1e-4, "critic_learning_rate": 2e-3, "max_prompt_length": 64,
              "max_completion_length": 64}

# Each rule names the settings that it reads as its parameters. Where it is false, the message follows the
# first of them. For a training script four numbers are added to the settings: the ranks that train (trainers)
# and that sample (samplers), the engines, and the passes over a step's completions.
RULES = (
    (lambda task, train_file, eval_file: task == "file" or not train_file and not eval_file,
     ": train_file={train_file} and eval_file={eval_file} are read only with --task=file"),
    # evaluate_model.py, which has no trainers, takes 0.
    (lambda temperature, trainers: temperature > 0, ": must be above 0"),
    (lambda token_budget, max_prompt_length, max_completion_length:
     max_prompt_length + max_completion_length <= token_budget,
     ": less than max_prompt_length + max_completion_length"),
    (lambda agent, environment, tools, system_prompt, max_turns:
     not agent or not (environment or tools or system_prompt or max_turns),
     ": environment, tools, system_prompt and max_turns are the agent's own"),
    (lambda agent, rollout_ranks: not agent, ": train_async.py plays no agents"),
    # A call with a limit says more than the watchdog, so its limit has to be reached first.
    (lambda timeout, call_timeout: not 0 < timeout <= 10 * call_timeout, ": not above 10 * call_timeout"),
    (lambda engine: engine != "vllm" or find_spec("vllm") is not None,
     " needs vLLM: install requirements.txt, or take --engine=hf"),
    # ranks
    (lambda vllm_tensor_parallel_size, samplers: samplers % vllm_tensor_parallel_size == 0,
     " does not divide the {samplers} ranks that sample"),
    (lambda vllm_tensor_parallel_size, engine: vllm_tensor_parallel_size == 1 or engine == "vllm"
     or engine == "auto" and find_spec("vllm") is not None, " needs engine=vllm"),
    (lambda sequence_parallel_size, trainers: trainers % sequence_parallel_size == 0,
     " does not divide the {trainers} ranks that train"),
    (lambda shard_ranks, trainers: trainers % (shard_ranks or 1) == 0,
     " does not divide the {trainers} ranks that train"),
    (lambda prompts_per_step, engines: prompts_per_step % engines == 0, " does not divide by {engines}"),
    (lambda max_staleness, in_flight: max_staleness > 0 or not in_flight,
     " with in_flight=True: engines that wait for the trainers have nothing in flight"),
    # updates
    (lambda num_epochs, updates_per_step: updates_per_step % num_epochs == 0,
     " does not divide updates_per_step={updates_per_step}"),
    (lambda updates_per_step, prompts_per_step, num_generations, passes:
     passes * prompts_per_step * num_generations % updates_per_step == 0,
     " does not divide the completions per step"),
    (lambda critic_warmup_steps, max_steps: critic_warmup_steps < max_steps, " leaves the policy no step"),
    # the loss
    (lambda engine_correction, old_logprobs: old_logprobs == "trainer" or engine_correction == "none",
     ": with old_logprobs=engine the ratio corrects already"),
    (lambda correction_low, correction_high: correction_low < correction_high,
     " is not below correction_high={correction_high}"),
    (lambda reference_model, kl_coef: not reference_model or kl_coef > 0, " needs a kl_coef above 0"),
    (lambda skip_zero_advantage, entropy_coef, kl_coef, kl_estimator:
     not skip_zero_advantage or entropy_coef == 0 and (kl_coef == 0 or kl_estimator.startswith("k1")),
     ", but entropy_coef or a KL in the loss moves the policy there too"),
    # the advantage
    (lambda num_generations, advantage: num_generations > 1 or advantage in ("reinforce++", "none"),
     ": advantage={advantage} compares a prompt's completions"),
    (lambda advantage, kl_estimator, kl_coef:
     advantage != "none" or kl_coef > 0 and kl_estimator == "k1_advantage",
     " teaches nothing without kl_estimator=k1_advantage and a kl_coef above 0"),
    (lambda advantage, kl_estimator, kl_coef:
     advantage != "grpo_process" or kl_coef == 0 or kl_estimator != "k1_reward",
     " takes the rewards of steps: kl_estimator=k1_reward changes none"),
    # what a step of DAPO trains on
    (lambda max_num_gen_batches, advantage:
     max_num_gen_batches == 0 or advantage not in ("reinforce++", "grpo_process", "none"),
     " leaves out prompts that teach something with advantage={advantage}"),
    (lambda overlong_buffer, max_completion_length: overlong_buffer <= max_completion_length,
     ": more than max_completion_length={max_completion_length}"),
    (lambda overlong_buffer, advantage: not overlong_buffer or advantage != "grpo_process",
     ": advantage={advantage} cannot take such a penalty"))


def check_values(settings):
    """Check each of a script's settings by itself, and by the rules those that have to fit each other."""
    values = vars(settings)
    for key, value in values.items():
        check(key not in POSITIVE or value > 0, f"{key}={value}: must be above 0")
        check(key not in POSITIVE or value < 2 ** 31, f"{key}={value}: too large")
        check(key not in NOT_NEGATIVE or value >= 0, f"{key}={value}: must not be negative")
        check(key not in SHARES or value <= 1, f"{key}={value}: must be from 0 to 1")
        if key in CHOICES:
            check(value in CHOICES[key], f"{key}={value}: choose {', '.join(CHOICES[key])}")
    for rule, message in RULES:
        names = [*inspect.signature(rule).parameters]
        if values.keys() >= {*names}:
            check(rule(*(values[name] for name in names)),
                  f"{names[0]}={values[names[0]]}{message.format(**values)}")


def check_suits(s, suits):
    """Refuse defaults that nobody set and that do not suit the model. suits: those that its config names."""
    left = [f"{key}={value}" for key, value in SUITS_TINY.items()
            if getattr(s, key, None) == value != suits.get(key) and key not in given]
    check(not left, f"{', '.join(left)}: the default, which suits the tiny model and not model={s.model}. "
                    "Give each a value; config/tasks/gsm8k.py is where to start with one of 0.6 B parameters")
