"""
The newer losses, and some of recipes/, against the functions of TRL 1.16, verl 0.9 and prime-rl that
compute the same: losses, and gradients with respect to the logits, in float64 on random numbers.

    out/trl/bin/python -m bench.peers           # bench/against_trl.py says how to make such an environment
    out/trl/bin/python -m bench.peers --verl=core_algos.py --prime_rl=loss.py

Here the loop of train_grpo.py itself runs, from the advantages to the backward pass, or the copy that a
recipe makes of it. Its model is a table of logits, and an update has two micro-batches. TRL's functions are called
as they are, with a stand-in for the trainer. Those of verl (verl/trainer/ppo/core_algos.py) and prime-rl
(src/prime_rl/trainer/rl/loss.py) are cut out of the files that you name, and neither has to be installed.
Each line has the largest difference of the gradients, as a part of the largest gradient, and the relative
difference of the losses, unless these differ by definition.
"""
import __future__
import ast
import os
import random
import shutil
import subprocess
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from types import MethodType, SimpleNamespace

import torch

import losses
from configurator import configure
# ------------------------------------------------------------------------------------------------------------
verl = ""                       # verl's core_algos.py; if empty, verl is left out
prime_rl = ""                   # prime-rl's loss.py; if empty, prime-rl is left out
# ------------------------------------------------------------------------------------------------------------
configure(globals())

# Imported here, so that --help and a wrong setting's message need no TRL.
from trl import GRPOTrainer
from trl.experimental.sdpo import sdpo_trainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

LENGTHS = [32, 8, 16, 16, 8, 16, 16, 16]        # powers of two, so that float32 has all weights exactly
G, N, T, V = 4, len(LENGTHS), max(LENGTHS), 11
MASK = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).double()          # [N, T]


def numbers(gap):
    """Logits, tokens and scores; logprobs of the engine, which are off by about `gap` in half of the
    completions, and of a reference; logits of a teacher."""
    torch.manual_seed(0)
    d = SimpleNamespace(logits=torch.randn(N, T, V, dtype=torch.float64) * 2 * torch.rand(N, T, 1).double(),
                        ids=torch.randint(V, (N, T)), scores=torch.tensor([1, 0, 0, 1, 0, 0, 1, 0]).double())
    logps = selective_log_softmax(d.logits, d.ids)
    off = gap * (torch.randn(N, T).double() + 0.5) * (torch.arange(N) % 2)[:, None]
    d.engine, d.ref = logps + off, logps + 0.5 * torch.randn(N, T, dtype=torch.float64)
    d.teacher = d.logits + torch.randn(N, T, V, dtype=torch.float64)
    return d


# ---------------------------------------------------------------- here
class Batch:
    """A micro-batch of some rollouts, without packing: tests/test_packing.py has that."""

    def __init__(self, share):
        self.share = share

    def flat(self, values):
        return torch.cat([values[s].expand(LENGTHS[s]) for s in self.share])

    def sequence_lengths(self):
        return self.flat(torch.tensor(LENGTHS))

    def parts(self, values):
        return zip(self.share, values.split([LENGTHS[s] for s in self.share]))

    def put(self, values, target):
        target |= self.parts(values)

    def mean(self, values):
        return torch.cat([part.mean().expand(len(part)) for _, part in self.parts(values)])


def loop_of(recipe):
    """Sections 3 to 5 of train_grpo.py up to the backward pass, or of the copy that a recipe makes of it."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy("train_grpo.py", folder)
        if recipe != "grpo":
            with open(f"recipes/{recipe}.diff") as diff:
                subprocess.run(["patch", "-p1", "--fuzz=0", "-s"], stdin=diff, cwd=folder, check=True)
        with open(f"{folder}/train_{recipe}.py") as file:
            text = file.read()
    settings = text[text.index("# settings that everybody sets first"):text.index("settings = configure")]
    loop = text[text.index("    # ------------------------------------------------------------ 3 advantage"):
                text.index("            if u == 0:")]
    return settings, "if True:\n" + loop


def here(d, recipe="grpo", ref=None, **given):
    """The loss of an update of all rollouts, its gradient, and the advantages."""
    logits, found, names = d.logits.clone().requires_grad_(), [], {}
    table, per = selective_log_softmax(logits, d.ids), lambda x: {s: x[s, :n] for s, n in enumerate(LENGTHS)}
    entropy = entropy_from_logits(logits)
    settings, loop = loop_of(recipe)
    exec(settings, names)
    rollouts = [SimpleNamespace(number=s, score=score, rewards={}, parts={}, sampled_by={0})
                for s, score in enumerate(d.scores.tolist())]
    names |= given | {
        "losses": losses, "torch": torch, "random": random, "G": G, "N": N, "step": 0, "world_size": 1,
        "scores": d.scores, "lengths": torch.tensor(LENGTHS), "rollouts": rollouts,
        "optimizer": None, "set_rates": lambda *_: {}, "engine_logps": per(d.engine),
        "scorer": SimpleNamespace(weights={}),
        "log": SimpleNamespace(timed=lambda _: nullcontext(), metrics={},
                               add=lambda sums, means: found.append(sums["loss"].item())),
        "reference": "given" if ref is not None else None,
        # A rollout stands for its number, and behind another prompt it is still that.
        "gathered_logprobs": lambda reference, shown, *_: per(ref),
        "behind_hint": lambda r, right: (r, names.setdefault("hints", []).append(right))[0],
        "token_logprobs": lambda *_: per(table.detach()),
        "deal_to_ranks": lambda _, shares: shares,
        "micro_batches": lambda policy, _, share, budget: [Batch(share[0::2]), Batch(share[1::2])],
        "policy": lambda batch, _: (batch.flat(per(table)), batch.flat(per(entropy))),
        "distributed": SimpleNamespace(gathered=lambda x: x)}
    # backward() of the second micro-batch goes through the table again.
    exec(loop.replace(".backward()", ".backward(retain_graph=True)"), names)
    names["hints"] = [right and right.number for right in names.get("hints", [])]
    return sum(found), logits.grad, names


# ---------------------------------------------------------------- TRL
def trl_grpo(d, adv, old=True, **settings):
    """GRPOTrainer's loss with these settings; without `old` the step is on-policy."""
    logits = d.logits.clone().requires_grad_()
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
                                  pad_across_processes=lambda x, **_: x)
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    trainer = SimpleNamespace(**{
        "args": args, "accelerator": accelerator, "model": SimpleNamespace(training=True), "beta": 0.0,
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token",
        "loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": False,
        "current_gradient_accumulation_steps": 1, "aux_loss_enabled": False, "_entropy_bonus_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)), "max_completion_length": T,
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (
            selective_log_softmax(logits, d.ids), entropy_from_logits(logits), None)} | settings)
    trainer.get_high_entropy_mask = MethodType(GRPOTrainer.get_high_entropy_mask, trainer)
    nothing = torch.zeros(N, 0, dtype=torch.long)
    loss = GRPOTrainer._compute_loss(trainer, None, {
        "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": d.ids, "completion_mask": MASK,
        "advantages": adv, "sampling_per_token_logps": d.engine, "ref_per_token_logps": d.ref,
        "num_items_in_batch": MASK.sum()} | ({"old_per_token_logps": d.engine} if old else {}))
    loss.backward()
    return loss.item(), logits.grad


def trl_sdpo(d, taught, **settings):
    """SDPOTrainer's loss of self-distillation, of the completions whose number is in `taught`."""
    logits = d.logits.clone().requires_grad_()
    mask = MASK * torch.tensor([float(s in taught) for s in range(N)])[:, None]
    trainer = SimpleNamespace(
        args=SimpleNamespace(**{"distillation_mode": "sampled_token", "distillation_alpha": 1.0,
                                "distillation_is_clip": 2.0} | settings),
        accelerator=SimpleNamespace(gather=lambda x: x), _log_self_distillation_metric=lambda *_: None)
    loss = sdpo_trainer.SDPOTrainer._compute_self_distillation_loss(
        trainer, SimpleNamespace(training=True), {"old_per_token_logps": d.engine},
        sdpo_trainer.DistillationLogits(completion_ids=d.ids, completion_mask=MASK, loss_mask=mask,
                                        student_logits=logits, teacher_logits=d.teacher))
    loss.backward()
    return loss.item(), logits.grad


def trl_hints(d):
    """Which completion SDPOTrainer shows the teacher of each, or None."""
    shown = []
    tokenizer = SimpleNamespace(pad_token_id=-1, decode=lambda ids, **_: str(ids[0].item()))
    ids = torch.arange(N)[:, None].expand(N, T).clone()             # a completion says its own number
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), num_generations=G, processing_class=tokenizer,
        _tokenizer=tokenizer, accelerator=SimpleNamespace(device="cpu", process_index=0, gather=lambda x: x,
                                                          pad_across_processes=lambda x, **_: x),
        args=SimpleNamespace(success_reward_threshold=1.0, dont_reprompt_on_self_success=True,
                             environment_feedback_only_without_solution=False, use_successful_as_teacher=True,
                             include_environment_feedback=False, remove_thinking_from_demonstration=False,
                             solution_template="{successful_previous_attempt}", max_reprompt_len=99,
                             reprompt_template="{solution}"),
        _tokenize_prompts_untruncated=lambda texts: shown.extend(texts) or [[0]] * len(texts))
    sdpo_trainer.gather_object = lambda x: x
    sdpo_trainer.SuccessfulRolloutTeacherContextBuilder(trainer).build(
        {"completion_ids": ids, "completion_mask": MASK}, ["prompt"] * N, d.scores)
    return [None if text == "prompt" else int(text) for text in shown]


# ---------------------------------------------------------------- verl, prime-rl
def cut_out(path, *wanted, **names):
    """These functions of a file, without what it imports, its decorators and its annotations."""
    with open(os.path.expanduser(path)) as file:
        tree = ast.parse(file.read())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    for node in tree.body:
        node.decorator_list = []
    names["torch"] = torch
    exec(compile(tree, path, "exec", flags=__future__.annotations.compiler_flag), names)
    return [names[name] for name in wanted]


def verl_dppo(d, adv, delta):
    logits = d.logits.clone().requires_grad_()
    masked = SimpleNamespace(masked_mean=lambda x, mask: (x * mask).sum() / mask.sum(),
                             masked_sum=lambda x, mask: (x * mask).sum())

    class Config(SimpleNamespace):
        get = lambda self, key, default: getattr(self, key, default)
    loss_of, _ = cut_out(verl, "compute_policy_loss_dppo_tv", "agg_loss", verl_F=masked, AlgoConfig=int)
    loss, _ = loss_of(d.engine, selective_log_softmax(logits, d.ids), adv[:, None].expand(N, T), MASK,
                      config=Config(clip_ratio=delta, clip_ratio_low=delta, clip_ratio_high=delta,
                                    clip_ratio_c=20.0, global_batch_info={}))
    loss.backward()
    return loss.item(), logits.grad


def prime_rl_loss(d, name, adv=None, ref=None, taught=range(N), **config):
    logits = d.logits.clone().requires_grad_()
    logps = selective_log_softmax(logits, d.ids)
    function, *_ = cut_out(prime_rl, name, "_safe_mean", "compute_importance_ratio_and_mismatch_kl",
                           LossOutputs=SimpleNamespace)
    total = 0.0
    for s, n in enumerate(LENGTHS):
        inputs = SimpleNamespace(
            trainer_logprobs=logps[s, :n], inference_logprobs=d.engine[s, :n], loss_weights=None,
            loss_mask=torch.full((n,), s in taught), ref_logprobs=None if ref is None else ref[s, :n],
            advantages=None if adv is None else adv[s].expand(n))
        total = total + function(inputs, *[SimpleNamespace(**config)] * bool(config)).loss
    (total / sum(LENGTHS)).backward()
    return total.item() / sum(LENGTHS), logits.grad


# ---------------------------------------------------------------- side by side
def compare(name, ours, theirs, differs=""):
    """A line. differs: why the losses do, so that only the gradients are compared."""
    (loss, grad, _), (other, other_grad) = ours, theirs
    gap = (grad - other_grad).abs().max() / other_grad.abs().max()
    print(f"{name:58} {gap:.0e}     {differs or f'{abs(loss - other) / abs(other):.0e}'}", flush=True)


print(f"{'':58} gradient  loss")
d, close = numbers(0.3), numbers(0.0)
for kl, given, beta in (("", {}, 0.0), (" and a KL", {"ref": d.ref, "kl_coef": 0.5}, 0.5)):
    for old in (True, False):
        ours = here(d, "off_policy_mask", mask_above=0.1, old_logprobs="engine" if old else "trainer", **given)
        compare(f"off-policy sequence mask{kl}, TRL{', ratios not 1' * old}", ours,
                trl_grpo(d, ours[2]["adv"], old, off_policy_mask_threshold=0.1, beta=beta))
ours = here(d, "high_entropy", entropy_share=0.2, old_logprobs="engine")
compare("high-entropy tokens, TRL", ours, trl_grpo(d, ours[2]["adv"], top_entropy_quantile=0.2))
ours = here(d, loss_type="gspo", loss_aggregation="sequence_sum", epsilon=0.02, epsilon_high=0.03,
            old_logprobs="engine")
compare("LUSPO, TRL", ours, trl_grpo(d, ours[2]["adv"], loss_type="luspo", epsilon_low=0.02,
                                     epsilon_high=0.03, importance_sampling_level="sequence"))

shown = trl_hints(close)
taught = [s for s in range(N) if shown[s] is not None]
teacher = close.engine.clone()                                  # without a hint the teacher is the student
teacher[taught] = selective_log_softmax(close.teacher, close.ids)[taught]
distil = {"kl_coef": 1.0, "kl_estimator": "k1_advantage", "advantage": "none",
          "loss_aggregation": "sequence_mean"}
ours = here(close, "self_distillation", teacher, **distil)
print(f"{'self-distillation, which answer the teacher sees, TRL':58} "
      f"{'the same' if ours[2]['hints'] == shown else 'not the same'}")
compare("self-distillation, sampled_token, TRL", ours, trl_sdpo(close, taught),
        "by definition: log policy takes the place of the ratio")
ours = here(close, "self_distillation", teacher, loss_type="gpg", **distil)
compare("self-distillation, sampled_token, TRL, loss_type=gpg", ours, trl_sdpo(close, taught))
if prime_rl:
    ours = here(close, "self_distillation", teacher, **distil | {"loss_aggregation": "token_mean"})
    compare("self-distillation, prime-rl's ref_kl", ours,
            prime_rl_loss(close, "ref_kl_loss_fn", ref=teacher, taught=taught))
# At each place the mean over all tokens that could have been sampled, by their probabilities
mean = 0.0
for token in range(V):
    close.ids = torch.full((N, T), token)
    close.engine = selective_log_softmax(close.logits, close.ids)
    teacher = selective_log_softmax(close.teacher, close.ids)
    mean = mean + close.engine.exp()[..., None] * here(close, "self_distillation", teacher, **distil)[1]
compare("    its mean over the vocabulary, TRL's full_logits", (0.0, mean, {}), trl_sdpo(
    close, range(N), distillation_mode="full_logits", distillation_is_clip=None), "not compared")

dppo = {"loss_type": "dppo", "epsilon": 0.05, "epsilon_high": 0.05, "old_logprobs": "engine"}
if verl:
    far = numbers(3.0)                                          # ratios on both sides of 20
    ours = here(far, **dppo)
    compare("DPPO, verl", ours, verl_dppo(far, ours[2]["adv"], 0.05))
if prime_rl:
    ours = here(d, **dppo)
    compare("DPPO, prime-rl with kl_tau=0", ours, prime_rl_loss(
        d, "default_loss_fn", ours[2]["adv"], dppo_mask_low=0.05, dppo_mask_high=0.05, adv_tau=1, kl_tau=0),
        "by definition: the ratio takes the place of log policy")
