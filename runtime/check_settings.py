"""
Settings that the scripts refuse before a model is loaded. Each message names the setting.

A script of your own may leave these calls out: they catch mistakes, and nothing else depends on them.
"""
from types import SimpleNamespace

from transformers import AutoConfig

import losses
from configurator import check, given

POSITIVE = """num_generations prompts_per_step max_completion_length token_budget updates_per_step num_epochs
    updates_per_epoch max_steps max_num_gen_batches eval_samples keep_checkpoints max_skipped_updates
    vllm_tensor_parallel_size vllm_gpu_memory_utilization samples top_p rollout_ranks sync_timeout
    sequence_parallel_size lora_alpha layers hidden_size intermediate_size heads steps batch_size""".split()
ANY_NUMBER = ("seed", "difficulty")         # all others are not negative
SHARES = """gamma lam top_p vllm_gpu_memory_utilization harder quick quick_steps quick_right warmup
    decay""".split()
CHOICES = {"engine": ("auto", "vllm", "hf"), "dtype": ("auto", "float32", "bfloat16"),
           "lr_decay": ("constant", "linear", "cosine"), "old_logprobs": ("trainer", "engine"),
           "reward_errors": ("stop", "unscored"),
           "kl_in": ("loss", "reward", "advantage"), "kl_estimator": losses.KL_ESTIMATORS,
           "advantage": losses.ADVANTAGES, "loss_type": losses.LOSSES,
           "loss_aggregation": losses.AGGREGATIONS, "engine_correction": losses.CORRECTIONS}
# Defaults of the scripts that suit the tiny model, whose config says so in `suits`, and not a larger one.
SUITS_TINY = {"learning_rate": 1e-4, "critic_learning_rate": 2e-3, "max_prompt_length": 64,
              "max_completion_length": 64}


def check_values(settings):
    """Each of a script's settings by itself."""
    for key, value in vars(settings).items():
        if type(value) in (int, float) and key not in ANY_NUMBER:
            check(value > 0 or key not in POSITIVE, f"{key}={value}: must be above 0")
            check(value >= 0, f"{key}={value}: must not be negative")
            check(value <= 1e9, f"{key}={value}: over 1e9, a slip of the hand")
        check(key not in ("beta1", "beta2") or value < 1, f"{key}={value}: must be from 0 to below 1")
        check(key not in SHARES or value <= 1, f"{key}={value}: must be from 0 to 1")
        check(key not in CHOICES or value in CHOICES[key],
              f"{key}={value}: choose {', '.join(CHOICES.get(key, ()))}")
        # On the command line, what is not UTF-8 comes as half a surrogate pair.
        check(key != "system_prompt" or value == value.encode(errors="ignore").decode(),
              f"{key}={value}: not UTF-8")
        check(key != "reward_workers" or not value or ":" in settings.reward,
              f"reward_workers={value} needs a reward of your own, file.py:function")
        check(key not in ("train_file", "eval_file") or not value or settings.task == "file",
              f"{key}={value}: it is read only with --task=file")


def check_suits(s, base):
    """Whether settings that were left as they are suit the model in this folder (or of this hub id)."""
    suits = getattr(AutoConfig.from_pretrained(base), "suits", {})
    left = [f"{key}={value}" for key, value in SUITS_TINY.items()
            if getattr(s, key, None) == value != suits.get(key) and key not in given]
    check(not left, f"{', '.join(left)}: the default, which suits the tiny model and not model={s.model}. "
                    "Give each a value; config/gsm8k.py is where to start with a model of 0.6 B parameters")


def check_divides(s, key, total, what):
    """Whether a setting divides this number of things, or is 0."""
    check(total % (getattr(s, key) or 1) == 0, f"{key}={getattr(s, key)} does not divide {what}")


def check_run(s, world_size):
    """What all training scripts have in common."""
    check_values(s)
    for key in ("temperature", "max_prompt_length"):            # which may be 0 in evaluate_model.py
        check(getattr(s, key) > 0, f"{key}={getattr(s, key)}: must be above 0")
    check(not 0 < s.timeout <= s.reward_step_timeout,
          f"timeout={s.timeout}: not above reward_step_timeout={s.reward_step_timeout}")
    check(not (s.environment or s.tools) or not 0 < s.timeout <= s.environment_timeout,
          f"timeout={s.timeout}: not above environment_timeout={s.environment_timeout}")
    check(s.prompts_per_step % world_size == 0,
          f"prompts_per_step={s.prompts_per_step} does not divide by {world_size} ranks")
    check_divides(s, "vllm_tensor_parallel_size", world_size, f"{world_size} ranks")
    check_divides(s, "sequence_parallel_size", world_size, f"{world_size} ranks")
    check_divides(s, "shard_ranks", world_size, f"{world_size} ranks")
    check(s.max_prompt_length + s.max_completion_length <= s.token_budget,
          f"token_budget={s.token_budget}: less than max_prompt_length + max_completion_length")
    check(s.kl_coef > 0 or not s.reference_model,
          f"reference_model={s.reference_model} needs a kl_coef above 0")
    check(s.dual_clip == 0 or s.dual_clip > 1 + s.epsilon_high,
          f"dual_clip={s.dual_clip}: not over 1 + epsilon_high")


def check_grpo(s):
    """The algorithm of GRPO and its variants: combinations that do nothing, or something wrong."""
    completions = s.prompts_per_step * s.num_generations
    check(s.epsilon < 1, f"epsilon={s.epsilon}: must be below 1")
    check_divides(s, "updates_per_step", completions, f"the {completions} completions of a step")
    check(s.num_generations > 1 or s.advantage in ("reinforce++", "none"),
          f"num_generations={s.num_generations}: advantage={s.advantage} compares a prompt's completions")
    check(s.dual_clip == 0 or s.loss_type in ("clip", "gspo"),
          f"dual_clip={s.dual_clip} would do nothing with loss_type={s.loss_type}")
    check(s.kl_coef == 0 or (s.kl_in == "loss") != (s.kl_estimator == "k1"),
          f"kl_estimator={s.kl_estimator} with kl_in={s.kl_in}: in the loss the gradient of k1 is 0 in "
          "expectation, elsewhere only k1 has the gradient of the KL")
    check(s.advantage != "none" or s.kl_coef > 0 and s.kl_in == "advantage",
          "advantage=none teaches nothing without kl_in=advantage and a kl_coef above 0")
    check(s.advantage not in ("grpo_process", "gdpo") or s.kl_coef == 0 or s.kl_in != "reward",
          f"advantage={s.advantage} takes the rewards of steps or parts, which kl_in=reward does not change")
    check(not s.skip_zero_advantage or s.entropy_coef == 0 and (s.kl_coef == 0 or s.kl_in != "loss"),
          "skip_zero_advantage=True, but entropy_coef or a KL in the loss moves the policy there as well")
    check(s.old_logprobs == "trainer" or s.loss_type != "gpg",
          "old_logprobs=engine would do nothing: gpg has no ratio")
    check(s.old_logprobs == "trainer" or s.engine_correction == "none",
          f"engine_correction={s.engine_correction}: with old_logprobs=engine the ratio corrects already")
    check(s.correction_low < s.correction_high,
          f"correction_low={s.correction_low} is not below correction_high={s.correction_high}")


def check_placement(s, world_size):
    """What train_async.py adds to GRPO; world_size is torchrun's, that of both roles together."""
    check_values(s)
    check(world_size > 1,
          "trainers and engines need a process each at least: torchrun --nproc_per_node=2 train_async.py")
    check(s.rollout_ranks < world_size,
          f"rollout_ranks={s.rollout_ranks} leaves no trainer: there are {world_size} ranks")
    trainers, engines = world_size - s.rollout_ranks, s.rollout_ranks // s.vllm_tensor_parallel_size
    check_divides(s, "vllm_tensor_parallel_size", s.rollout_ranks, f"rollout_ranks={s.rollout_ranks}")
    check_divides(s, "sequence_parallel_size", trainers, f"{trainers} trainers")
    check_divides(s, "shard_ranks", trainers, f"{trainers} trainers")
    # Prompts are split over engines, as over ranks elsewhere. Both sizes are checked above.
    whole = {"vllm_tensor_parallel_size": 1, "sequence_parallel_size": 1, "shard_ranks": 0}
    check_run(SimpleNamespace(**vars(s) | whole), engines)
    check(s.max_staleness > 0 or not s.in_flight,
          "in_flight=True with max_staleness=0: engines that wait for the trainers have nothing in flight")
    check(not 0 < s.timeout <= s.sync_timeout,
          f"timeout={s.timeout}: not above sync_timeout={s.sync_timeout}, which names what did not come")


def check_dapo(s):
    """What train_dapo.py adds to GRPO."""
    check(s.advantage not in ("reinforce++", "gdpo", "none") or not s.filter_groups,
          f"filter_groups=True leaves out prompts that teach something with advantage={s.advantage}")
    check(s.filter_groups or s.max_num_gen_batches == 1,
          f"max_num_gen_batches={s.max_num_gen_batches}: above 1 it needs --filter_groups=true")
    check(s.overlong_buffer <= s.max_completion_length,
          f"overlong_buffer={s.overlong_buffer}: more than max_completion_length={s.max_completion_length}")
    check(s.advantage not in ("grpo_process", "gdpo") or not s.overlong_buffer,
          f"overlong_buffer={s.overlong_buffer}: advantage={s.advantage} cannot take such a penalty")


def check_ppo(s):
    """The algorithm of PPO."""
    completions = s.prompts_per_step * s.num_generations
    check(s.critic_warmup_steps < s.max_steps,
          f"critic_warmup_steps={s.critic_warmup_steps} leaves the policy no step")
    check_divides(s, "updates_per_epoch", completions, f"the {completions} completions of a step")
