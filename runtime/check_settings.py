"""
Checks that refuse settings before a model is loaded. Each message names the setting.

They catch mistakes, and nothing else depends on them. A script of your own may drop settings; the rules that
read one of these are then left out.
"""
import contextlib
from types import SimpleNamespace

from transformers import AutoConfig

from configurator import check, given

POSITIVE = """num_generations prompts_per_step max_completion_length token_budget updates_per_step num_epochs
    updates_per_epoch max_steps max_num_gen_batches eval_samples keep_checkpoints max_skipped_updates
    vllm_tensor_parallel_size vllm_gpu_memory_utilization samples top_p rollout_ranks
    sequence_parallel_size layers hidden_size intermediate_size heads steps batch_size""".split()
ANY_NUMBER = ("seed", "difficulty")         # no other number may be negative
SHARES = """gamma lam top_p vllm_gpu_memory_utilization harder quick quick_steps quick_right warmup
    decay""".split()
CHOICES = {"engine": ("auto", "vllm", "hf"), "dtype": ("auto", "float32", "bfloat16"),
           "lr_decay": ("constant", "linear", "cosine"), "old_logprobs": ("trainer", "engine"),
           "reward_errors": ("stop", "unscored"), "kl_in": ("loss", "reward", "advantage")}
# Defaults of the scripts that suit the tiny model, whose config says so in `suits`, and no larger one.
SUITS_TINY = {"learning_rate": 1e-4, "critic_learning_rate": 2e-3, "max_prompt_length": 64,
              "max_completion_length": 64}


def check_values(settings):
    """Check each of a script's settings by itself."""
    for key, value in vars(settings).items():
        if type(value) in (int, float) and key not in ANY_NUMBER:
            check(value > 0 or key not in POSITIVE, f"{key}={value}: must be above 0")
            check(value >= 0, f"{key}={value}: must not be negative")
            check(value <= 1e9, f"{key}={value}: must not be above 1e9")
        check(key not in ("beta1", "beta2") or value < 1, f"{key}={value}: must be from 0 to below 1")
        check(key not in SHARES or value <= 1, f"{key}={value}: must be from 0 to 1")
        check(key not in CHOICES or value in CHOICES[key],
              f"{key}={value}: choose {', '.join(CHOICES.get(key, ()))}")
        # A byte of the command line that is not UTF-8 becomes half a surrogate pair.
        check(key != "system_prompt" or value == value.encode(errors="ignore").decode(),
              f"{key}={value}: not UTF-8")
        check(key not in ("train_file", "eval_file") or not value or settings.task == "file",
              f"{key}={value}: it is read only with --task=file")


def divides(s, key, number, what):
    value = getattr(s, key)
    return number % (value or 1) == 0, f"{key}={value} does not divide the {number} {what}"


def below_timeout(s, key):
    # Whatever has a limit of its own says more than the watchdog, so its limit has to be reached first.
    return not 0 < s.timeout <= getattr(s, key), f"timeout={s.timeout}: not above {key}={getattr(s, key)}"


# Each rule returns whether several settings fit together, and a message for when they do not. check_run adds
# trainers, samplers and engines, which are numbers of ranks, to the settings.
RULES = (
    lambda s: (s.trainers > 0, f"rollout_ranks={s.samplers} leaves no trainer: there are "
               f"{s.trainers + s.samplers} ranks (torchrun --nproc_per_node=2 train_async.py has two)"),
    # Only evaluate_model.py takes 0 for these two.
    lambda s: (s.temperature > 0, f"temperature={s.temperature}: must be above 0"),
    lambda s: (s.max_prompt_length > 0, f"max_prompt_length={s.max_prompt_length}: must be above 0"),
    lambda s: (s.max_prompt_length + s.max_completion_length <= s.token_budget,
               f"token_budget={s.token_budget}: less than max_prompt_length + max_completion_length"),
    # The calls of a step's rewards have ten times this time.
    lambda s: (not 0 < s.timeout <= 10 * s.call_timeout,
               f"timeout={s.timeout}: not above 10 * call_timeout={10 * s.call_timeout:g}"),
    lambda s: divides(s, "vllm_tensor_parallel_size", s.samplers, "ranks that sample"),
    lambda s: divides(s, "sequence_parallel_size", s.trainers, "ranks that train"),
    lambda s: divides(s, "shard_ranks", s.trainers, "ranks that train"),
    lambda s: (s.prompts_per_step % s.engines == 0,
               f"prompts_per_step={s.prompts_per_step} does not divide by {s.engines}"),
    lambda s: divides(s, "updates_per_step", s.prompts_per_step * s.num_generations, "completions per step"),
    lambda s: divides(s, "updates_per_epoch", s.prompts_per_step * s.num_generations, "completions per step"),
    lambda s: (s.critic_warmup_steps < s.max_steps,
               f"critic_warmup_steps={s.critic_warmup_steps} leaves the policy no step"),
    lambda s: (s.max_staleness > 0 or not s.in_flight, "in_flight=True with max_staleness=0: "
               "engines that wait for the trainers have nothing in flight"),
    # the loss
    lambda s: (s.epsilon < 1, f"epsilon={s.epsilon}: must be below 1"),
    lambda s: (s.dual_clip == 0 or s.dual_clip > 1 + s.epsilon_high,
               f"dual_clip={s.dual_clip}: not over 1 + epsilon_high"),
    lambda s: (s.dual_clip == 0 or s.loss_type in ("clip", "gspo"),
               f"dual_clip={s.dual_clip} would do nothing with loss_type={s.loss_type}"),
    lambda s: (s.old_logprobs == "trainer" or s.loss_type != "gpg",
               "old_logprobs=engine would do nothing: gpg has no ratio"),
    lambda s: (s.old_logprobs == "trainer" or s.engine_correction == "none", f"engine_correction="
               f"{s.engine_correction}: with old_logprobs=engine the ratio corrects already"),
    lambda s: (s.correction_low < s.correction_high,
               f"correction_low={s.correction_low} is not below correction_high={s.correction_high}"),
    lambda s: (s.kl_coef > 0 or not s.reference_model,
               f"reference_model={s.reference_model} needs a kl_coef above 0"),
    lambda s: (s.kl_coef == 0 or (s.kl_in == "loss") != (s.kl_estimator == "k1"),
               f"kl_estimator={s.kl_estimator} with kl_in={s.kl_in}: in the loss the gradient of k1 is 0 in "
               "expectation, elsewhere only k1 has the gradient of the KL"),
    lambda s: (not s.skip_zero_advantage or s.entropy_coef == 0 and (s.kl_coef == 0 or s.kl_in != "loss"),
               "skip_zero_advantage=True, but entropy_coef or a KL in the loss moves the policy there too"),
    # the advantage
    lambda s: (s.num_generations > 1 or s.advantage in ("reinforce++", "none"), "num_generations=1: "
               f"advantage={s.advantage} compares a prompt's completions"),
    lambda s: (s.advantage != "none" or s.kl_coef > 0 and s.kl_in == "advantage",
               "advantage=none teaches nothing without kl_in=advantage and a kl_coef above 0"),
    lambda s: (s.advantage not in ("grpo_process", "gdpo") or s.kl_coef == 0 or s.kl_in != "reward",
               f"advantage={s.advantage} takes the rewards of steps or parts: kl_in=reward changes none"),
    # what a step of DAPO trains on
    lambda s: (s.advantage not in ("reinforce++", "gdpo", "none") or not s.filter_groups,
               f"filter_groups=True leaves out prompts that teach something with advantage={s.advantage}"),
    lambda s: (s.filter_groups or s.max_num_gen_batches == 1,
               f"max_num_gen_batches={s.max_num_gen_batches}: above 1 it needs --filter_groups=true"),
    lambda s: (s.overlong_buffer <= s.max_completion_length, f"overlong_buffer={s.overlong_buffer}: "
               f"more than max_completion_length={s.max_completion_length}"),
    lambda s: (s.advantage not in ("grpo_process", "gdpo") or not s.overlong_buffer,
               f"overlong_buffer={s.overlong_buffer}: advantage={s.advantage} cannot take such a penalty"))


def check_run(settings, trainers):
    """Check all settings of a training script. trainers: how many ranks train."""
    check_values(settings)
    # Ranks that train also sample, each for prompts of its own, unless there are ranks for the engines alone.
    samplers = getattr(settings, "rollout_ranks", 0)
    engines = max(1, samplers // settings.vllm_tensor_parallel_size) if samplers else trainers
    s = SimpleNamespace(**vars(settings), trainers=trainers, samplers=samplers or trainers, engines=engines)
    for rule in RULES:
        with contextlib.suppress(AttributeError):
            check(*rule(s))


def check_suits(s, base):
    """Refuse defaults that nobody set and that do not suit the model in this folder (or of this hub id)."""
    suits = getattr(AutoConfig.from_pretrained(base), "suits", {})
    left = [f"{key}={value}" for key, value in SUITS_TINY.items()
            if getattr(s, key, None) == value != suits.get(key) and key not in given]
    check(not left, f"{', '.join(left)}: the default, which suits the tiny model and not model={s.model}. "
                    "Give each a value; config/gsm8k.py is where to start with a model of 0.6 B parameters")
