"""
Settings that the training scripts and replay.py refuse before a model is loaded. Each message names the
setting.

A script of your own may leave these calls out: they catch mistakes, and nothing else depends on them.
"""
from types import SimpleNamespace

import losses
import rollout
from configurator import check, input_errors

POSITIVE = """temperature num_generations prompts_per_step max_prompt_length max_completion_length
    token_budget updates_per_step num_epochs updates_per_epoch max_steps pass_k cov_share max_num_gen_batches
    kl_horizon eval_samples eval_interval save_interval sample_interval keep_checkpoints max_skipped_updates
    vllm_tensor_parallel_size vllm_gpu_memory_utilization samples top_p max_turns rollout_ranks
    sync_timeout sequence_parallel_size""".split()
NOT_NEGATIVE = """learning_rate critic_learning_rate warmup_steps critic_warmup_steps weight_decay grad_clip
    epsilon epsilon_high dual_clip value_clip kl_coef kl_target max_kl entropy_coef correction_low
    correction_high overlong_buffer overlong_penalty skip_after logprob_gap reward_timeout
    reward_step_timeout timeout train_prompts eval_prompts top_k show environment_workers
    environment_timeout max_staleness""".split()
SHARES = ("gamma", "lam", "cov_share", "top_p", "vllm_gpu_memory_utilization")
LARGEST = 1e9                   # of numbers that must not be negative; more is a slip of the hand
DECAYS = ("constant", "linear", "cosine")
CHOICES = {"dtype": ("auto", "float32", "bfloat16"), "lr_decay": DECAYS, "entropy_decay": DECAYS,
           "old_logprobs": ("trainer", "engine"), "kl_in": ("loss", "reward"), "advantage": losses.ADVANTAGES,
           "loss_type": losses.LOSSES, "loss_aggregation": losses.AGGREGATIONS,
           "engine_correction": losses.CORRECTIONS, "kl_estimator": losses.KL_ESTIMATORS,
           "stale": ("wait", "drop")}


def check_values(settings):
    """Each of a script's settings by itself."""
    for key, value in settings.items():
        check(key not in POSITIVE or value > 0, f"{key}={value}: must be above 0")
        check(key not in NOT_NEGATIVE or value >= 0, f"{key}={value}: must not be negative")
        check(key not in POSITIVE + NOT_NEGATIVE or value <= LARGEST, f"{key}={value}: over {LARGEST:g}")
        check(key not in ("beta1", "beta2") or 0 <= value < 1, f"{key}={value}: must be from 0 to below 1")
        check(key not in SHARES or 0 <= value <= 1, f"{key}={value}: must be from 0 to 1")
        check(key not in CHOICES or value in CHOICES[key],
              f"{key}={value}: choose {', '.join(CHOICES.get(key, ()))}")
        # On the command line, what is not UTF-8 comes as half a surrogate pair.
        check(key != "system_prompt" or value == value.encode(errors="ignore").decode(),
              f"{key}={value}: not UTF-8")


def check_run(settings, world_size):
    """What all training scripts have in common."""
    check_values(settings)
    with input_errors():
        rollout.engine_class(settings["engine"])
    s = SimpleNamespace(**settings)
    # ReMax scores twice a step.
    budget = s.reward_step_timeout * (2 if settings.get("advantage") == "remax" else 1)
    check(not 0 < s.timeout <= budget, f"timeout={s.timeout}: not above the {budget} seconds of rewards that "
                                       "reward_step_timeout allows in a step")
    check_files(settings)
    check(s.prompts_per_step % world_size == 0,
          f"prompts_per_step={s.prompts_per_step} does not divide by {world_size} ranks")
    check(world_size % s.vllm_tensor_parallel_size == 0,
          f"vllm_tensor_parallel_size={s.vllm_tensor_parallel_size} does not divide {world_size} ranks")
    check(world_size % s.sequence_parallel_size == 0,
          f"sequence_parallel_size={s.sequence_parallel_size} does not divide {world_size} ranks")
    check(s.max_prompt_length + s.max_completion_length <= s.token_budget,
          f"token_budget={s.token_budget}: less than max_prompt_length + max_completion_length")
    check(not (s.environment and 0 < s.timeout <= s.environment_timeout),
          f"timeout={s.timeout}: not above environment_timeout={s.environment_timeout}")
    check(s.reward != "none" or s.reward_model or s.environment,
          "reward=none needs a reward_model or an environment")
    check(s.reward_model or s.reward_weight == s.reward_model_weight == 1,
          f"reward_weight={s.reward_weight} and reward_model_weight={s.reward_model_weight} need a "
          "reward_model")


def check_files(settings):
    """Files that nothing would read."""
    for key in ("train_file", "eval_file"):
        check(not settings[key] or settings["task"] == "file",
              f"{key}={settings[key]}: it is read only with --task=file")


def check_grpo(settings):
    """The algorithm of GRPO and its variants: combinations that do nothing, or something wrong."""
    s = SimpleNamespace(**settings)
    completions = s.prompts_per_step * s.num_generations
    check(s.epsilon < 1, f"epsilon={s.epsilon}: must be below 1")
    check(completions % s.updates_per_step == 0,
          f"updates_per_step={s.updates_per_step} does not divide the {completions} completions of a step")
    check(s.num_generations > 1 or s.advantage in ("remax", "reinforce++"),
          f"num_generations={s.num_generations}: advantage={s.advantage} compares the completions of a "
          "prompt with each other and needs at least 2")
    check(s.advantage != "pass_at_k" or s.pass_k <= s.num_generations,
          f"pass_k={s.pass_k}: more than num_generations={s.num_generations}")
    check(s.advantage != "pass_at_k" or not (s.reward_model or s.kl_coef and s.kl_in == "reward"),
          "advantage=pass_at_k is for scores of 0 and 1: without a reward_model and without kl_in=reward")
    check(s.dual_clip == 0 or s.dual_clip > 1 + s.epsilon_high,
          f"dual_clip={s.dual_clip}: not over 1 + epsilon_high")
    check(s.dual_clip == 0 or s.loss_type in ("clip", "gspo", "clip_cov"),
          f"dual_clip={s.dual_clip} would do nothing with loss_type={s.loss_type}")
    check(s.kl_coef == 0 or s.kl_in == "reward" or s.kl_estimator != "k1",
          "kl_estimator=k1: its gradient in the loss is 0 in expectation; use it with --kl_in=reward")
    check(s.kl_coef == 0 or s.kl_in == "loss" or s.kl_estimator == "k1",
          f"kl_estimator={s.kl_estimator}: in the reward only k1 has the gradient of the KL; with "
          "--kl_in=reward set --kl_estimator=k1")
    check(s.old_logprobs == "trainer" or s.loss_type != "gpg",
          "old_logprobs=engine would do nothing: gpg has no ratio")
    check(s.old_logprobs == "trainer" or s.engine_correction == "none",
          f"engine_correction={s.engine_correction} would do nothing: with old_logprobs=engine the ratio "
          "itself corrects for the engine")
    check(s.correction_low < s.correction_high,
          f"correction_low={s.correction_low} is not below correction_high={s.correction_high}")


def check_placement(settings, world_size):
    """What train_async.py adds to GRPO; world_size is torchrun's, that of both roles together."""
    s = SimpleNamespace(**settings)
    check_values(settings)
    check(world_size > 1, "trainers and engines need a process each at least: torchrun --nproc_per_node=2 "
                          "train_async.py")
    check(s.rollout_ranks < world_size,
          f"rollout_ranks={s.rollout_ranks} leaves no trainer: there are {world_size} ranks")
    check(s.rollout_ranks % s.vllm_tensor_parallel_size == 0,
          f"vllm_tensor_parallel_size={s.vllm_tensor_parallel_size} does not divide "
          f"rollout_ranks={s.rollout_ranks}")
    trainers = world_size - s.rollout_ranks
    check(trainers % s.sequence_parallel_size == 0,
          f"sequence_parallel_size={s.sequence_parallel_size} does not divide {trainers} trainers")
    with input_errors():
        spreads = rollout.engine_class(s.engine) is rollout.VLLMEngine
    check(spreads or s.vllm_tensor_parallel_size == 1,
          f"vllm_tensor_parallel_size={s.vllm_tensor_parallel_size}: engine=hf has one rank")
    engines = s.rollout_ranks // s.vllm_tensor_parallel_size
    check(s.prompts_per_step % engines == 0,
          f"prompts_per_step={s.prompts_per_step} does not divide by {engines} engines")
    # Prompts are split over engines, as over ranks elsewhere. Both sizes are checked above.
    check_run(settings | {"vllm_tensor_parallel_size": 1, "sequence_parallel_size": 1}, engines)
    check(s.max_staleness > 0 or not s.in_flight,
          "in_flight=True with max_staleness=0: engines that wait for the trainers have nothing in flight")
    check(not 0 < s.timeout <= s.sync_timeout,
          f"timeout={s.timeout}: not above sync_timeout={s.sync_timeout}, which names what did not come")
    check(s.in_flight or s.stale == "wait",
          "stale=drop needs --in_flight=true: otherwise nothing becomes older than max_staleness")


def check_dapo(settings):
    """What train_dapo.py adds to GRPO."""
    s = SimpleNamespace(**settings)
    check(s.advantage not in ("remax", "reinforce++") or not (s.filter_groups or s.skip_after),
          f"filter_groups={s.filter_groups}, skip_after={s.skip_after}: they leave out prompts whose "
          f"completions all have the same score, which teach something with advantage={s.advantage}")
    check(s.filter_groups or s.max_num_gen_batches == 1,
          f"max_num_gen_batches={s.max_num_gen_batches}: above 1 it needs --filter_groups=true")
    check(s.overlong_buffer <= s.max_completion_length,
          f"overlong_buffer={s.overlong_buffer}: more than max_completion_length={s.max_completion_length}")
    check(s.advantage != "remax" or not s.overlong_buffer,
          "advantage=remax: its baseline knows no overlong_buffer")
    check(s.advantage != "pass_at_k" or not s.overlong_buffer,
          "advantage=pass_at_k is for scores of 0 and 1: without overlong_buffer")


def check_ppo(settings):
    """The algorithm of PPO."""
    s = SimpleNamespace(**settings)
    completions = s.prompts_per_step * s.num_generations
    check(s.dual_clip == 0 or s.dual_clip > 1 + s.epsilon_high,
          f"dual_clip={s.dual_clip}: not over 1 + epsilon_high")
    check(s.critic_warmup_steps < s.max_steps,
          f"critic_warmup_steps={s.critic_warmup_steps} leaves the policy no step")
    check(s.kl_horizon >= completions, f"kl_horizon={s.kl_horizon}: less than a step")
    check(s.kl_coef > 0 or s.kl_target == 0,
          f"kl_target={s.kl_target} needs a kl_coef above 0 to start from")
    check(completions % s.updates_per_epoch == 0,
          f"updates_per_epoch={s.updates_per_epoch} does not divide the {completions} completions of a step")
