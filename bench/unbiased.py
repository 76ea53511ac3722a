"""
Which advantages and aggregations have, in expectation, the gradient of the mean return? All groups of five
small problems are enumerated, so the answer has no sampling error.

    python -m bench.unbiased

The expected gradient of an update is compared with the gradient of the mean return over the prompts. The
first table has every entry of losses.ADVANTAGES with loss_aggregation=sequence_sum, and the second one every
entry of losses.AGGREGATIONS with advantage=turns. A cell has the angle between the two gradients and the
ratio of their lengths. The learning rate makes up for a length, but not for an angle. The last column says
what the expected gradient favours: the parts of it that are larger than in the true one, if both are scaled
to the same length. The third table has the angles by the size of the group. An update is on-policy and has
one group of each prompt. There is no clipping and no KL.
"""
import itertools
import math
from collections import Counter
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

import losses


class Episode(NamedTuple):
    """What a prompt may lead to. logps [len]: the logprobs of its tokens, with gradient. rewards: {token: reward}."""
    logps: torch.Tensor
    rewards: dict


class Problem(NamedTuple):
    """logits [K]: the parameters. prompts: for each prompt the list of its possible Episodes. contrasts: triples
    (a direction [K] of the parameters, what a gradient favours that is longer in it, and what one that is shorter)."""
    logits: torch.Tensor
    prompts: list
    num_generations: int
    contrasts: list


def parameters(*logits):
    return torch.tensor(logits, dtype=torch.float64).requires_grad_()


def logit(probability):
    return math.log(probability / (1 - probability))


def answer(logp, length, reward):
    """An answer whose first token decides everything; the others are certain."""
    certain = torch.zeros(length - 1, dtype=torch.float64)
    return Episode(torch.cat([logp[None], certain]), {length - 1: reward})


def unequal_lengths(num_generations=4):
    """One turn: a right answer has 1 or 4 tokens, and so has a wrong one, with equal probabilities."""
    logits = parameters(*map(math.log, (0.2, 0.2, 0.3, 0.3)))
    right_short, right_long, wrong_short, wrong_long = logits.log_softmax(0)
    episodes = [answer(right_short, 1, 1.0), answer(right_long, 4, 1.0),
                answer(wrong_short, 1, 0.0), answer(wrong_long, 4, 0.0)]
    return Problem(logits, [episodes], num_generations, [
        ([1, -1, 0, 0], "short right answers", "long right answers"),
        ([0, 0, 1, -1], "short wrong answers", "long wrong answers")])


def two_turns(num_generations=3):
    """In turn 1 the policy ends the episode with reward 0.6 or goes on with 0.2; in turn 2 it gets 1 or 0.1."""
    logits = parameters(logit(0.3), logit(0.6))
    (end, good), (go_on, bad) = logsigmoid(logits), logsigmoid(-logits)
    episodes = [Episode(torch.stack([end]), {0: 0.6}),
                Episode(torch.stack([go_on, good]), {0: 0.2, 1: 1.0}),
                Episode(torch.stack([go_on, bad]), {0: 0.2, 1: 0.1})]
    return Problem(logits, [episodes], num_generations, [([1, 0], "early ends", "late ends")])


def early_end(num_generations=3):
    """An answer has a step with reward 0.5 or 0. A token without a reward ends it there, or a second step gets 0.6
    or -0.2, and then a token ends it."""
    logits = parameters(0.0, logit(0.4), logit(0.7))
    (right, end, good), (wrong, go_on, bad) = logsigmoid(logits), logsigmoid(-logits)
    certain = torch.zeros((), dtype=torch.float64)
    episodes = []
    for step, reward in ((right, 0.5), (wrong, 0.0)):
        episodes += [Episode(torch.stack([step, end]), {0: reward}),
                     Episode(torch.stack([step, go_on, good, certain]), {0: reward, 2: 0.6}),
                     Episode(torch.stack([step, go_on, bad, certain]), {0: reward, 2: -0.2})]
    return Problem(logits, [episodes], num_generations, [([0, 1, 0], "early ends", "late ends")])


def difficulty(num_generations=4):
    """Three prompts with one token each, which is right with probability 0.1, 0.5 and 0.9."""
    logits = parameters(logit(0.1), logit(0.5), logit(0.9))
    prompts = [[answer(right, 1, 1.0), answer(wrong, 1, 0.0)]
               for right, wrong in zip(logsigmoid(logits), logsigmoid(-logits))]
    return Problem(logits, prompts, num_generations, [
        ([1, -2, 1], "hard and easy prompts", "prompts of medium difficulty")])


def lengths_of_prompts(num_generations=4):
    """Two prompts, half of whose answers are right. The answers of one have 1 token, those of the other 4."""
    logits = parameters(0.0, 0.0)
    prompts = [[answer(right, length, 1.0), answer(wrong, length, 0.0)]
               for right, wrong, length in zip(logsigmoid(logits), logsigmoid(-logits), (1, 4))]
    return Problem(logits, prompts, num_generations, [
        ([1, -1], "prompts with short answers", "prompts with long answers")])


PROBLEMS = {"unequal lengths": unequal_lengths, "two turns": two_turns, "an early end": early_end,
            "difficulty": difficulty, "lengths of prompts": lengths_of_prompts}


def true_gradient(problem):
    """Return the gradient of the mean return over the prompts, [K]."""
    total = 0.0
    for episodes in problem.prompts:
        for episode in episodes:
            total += episode.logps.sum().exp() * sum(episode.rewards.values())
    [gradient] = torch.autograd.grad(total / len(problem.prompts), problem.logits, retain_graph=True)
    return gradient


def groups_of(episodes, size):
    """Yield (probability, numbers of its members) of each group. The order of the members is not distinguished."""
    probabilities = [episode.logps.sum().exp().item() for episode in episodes]
    for members in itertools.combinations_with_replacement(range(len(episodes)), size):
        orders = math.factorial(size)
        for count in Counter(members).values():
            orders //= math.factorial(count)
        yield orders * math.prod(probabilities[i] for i in members), members


def expected_gradients(problem, advantages=tuple(losses.ADVANTAGES)):
    """Return {(advantage, aggregation): the expected gradient of an update, [K]}."""
    G = problem.num_generations
    every = [episode for episodes in problem.prompts for episode in episodes]
    logps = torch.cat([episode.logps for episode in every])                             # [M]
    places = torch.arange(len(logps)).split([len(episode.logps) for episode in every])  # of an episode's tokens
    firsts = itertools.accumulate([len(episodes) for episodes in problem.prompts], initial=0)
    groups = [[(probability, [first + i for i in members]) for probability, members in groups_of(episodes, G)]
              for first, episodes in zip(firsts, problem.prompts)]
    # {(advantage, aggregation): [M]}: the expectation of weight * advantage for each token.
    factors = {key: torch.zeros(len(logps), dtype=torch.float64)
               for key in itertools.product(advantages, losses.AGGREGATIONS)}
    for batch in itertools.product(*groups):
        probability = math.prod(chance for chance, _ in batch)
        sampled = [i for _, members in batch for i in members]
        tokens = torch.cat([places[i] for i in sampled])
        lengths = torch.tensor([len(places[i]) for i in sampled])
        rewards = [every[i].rewards for i in sampled]
        scores = torch.tensor([sum(own.values()) for own in rewards], dtype=torch.float64)
        weights = {aggregation: losses.sequence_weights(lengths, aggregation, range(len(sampled)), G,
                                                        max(len(own) for own in places))
                   for aggregation in losses.AGGREGATIONS}
        for advantage in advantages:
            adv = losses.ADVANTAGES[advantage](scores, G, lengths=lengths, rewards=rewards)
            token_adv = torch.cat([adv[s].expand(len(places[i])) for s, i in enumerate(sampled)]).double()
            for aggregation, weight in weights.items():
                token_weight = weight.repeat_interleave(lengths)
                factors[advantage, aggregation].index_add_(0, tokens, probability * token_weight * token_adv)
    return {key: torch.autograd.grad(logps, problem.logits, factor, retain_graph=True)[0]
            for key, factor in factors.items()}


def compared(gradient, true):
    """Return the angle between two gradients in degrees, and the ratio of their lengths. Without a gradient the
    angle is NaN."""
    if not gradient.any():
        return math.nan, 0.0
    along = gradient @ true / true.norm()
    across = gradient - along * true / true.norm()
    return math.degrees(math.atan2(across.norm(), along)), (gradient.norm() / true.norm()).item()


def favoured(problem, gradient, true):
    """Yield (what the gradient favours, and its opposite)."""
    for direction, more, less in problem.contrasts:
        difference = torch.tensor(direction).double() @ (gradient / gradient.norm() - true / true.norm())
        if difference.abs() > 0.005:
            yield (more, less) if difference > 0 else (less, more)


def line(name, gradients):
    """Return a line of a table. gradients: {problem: its expected gradient}."""
    cells, favours = [f"`{name}`"], {}
    for make, gradient in gradients.items():
        problem = make()
        true = true_gradient(problem)
        angle, ratio = compared(gradient, true)
        cells.append(f"{angle:.1f}°, {ratio:.2f}")
        if math.isnan(angle):
            cells[-1] = "no gradient"
        else:
            favours |= favoured(problem, gradient, true)
    # A bias that has one sign in a problem and the other in another is no preference for either.
    words = [f"{more} or {less}" if more in favours.values() else more for more, less in favours.items()
             if less not in favours or more < less]
    return f"| {' | '.join(cells)} | {', '.join(words) or 'nothing'} |"


def tables():
    """Return two lists of lines: one line for each advantage, and one for each aggregation."""
    gradients = {make: expected_gradients(make()) for make in PROBLEMS.values()}
    advantages = [line(advantage, {make: own[advantage, "sequence_sum"] for make, own in gradients.items()})
                  for advantage in losses.ADVANTAGES]
    aggregations = [line(aggregation, {make: own["turns", aggregation] for make, own in gradients.items()})
                    for aggregation in losses.AGGREGATIONS]
    return advantages, aggregations


SIZES = 2, 4, 8
# recipes/grpo_process.diff adds grpo_process. Where it was not applied, its line is left out.
BY_SIZE = (("grpo", "sequence_sum", "difficulty"), ("grpo_process", "sequence_sum", "two turns"),
           ("reinforce++", "sequence_sum", "unequal lengths"), ("turns", "token_mean", "unequal lengths"),
           ("turns", "sequence_mean", "unequal lengths"))


def table_by_size():
    """Return a line for each entry of BY_SIZE, with the angles for groups of these sizes."""
    lines = []
    for advantage, aggregation, name in BY_SIZE:
        if advantage not in losses.ADVANTAGES:
            continue
        angles = []
        for size in SIZES:
            problem = PROBLEMS[name](size)
            gradient = expected_gradients(problem, [advantage])[advantage, aggregation]
            angles.append(f"{compared(gradient, true_gradient(problem))[0]:.1f}°")
        lines.append(f"| `{advantage}`, `{aggregation}` | {name} | {' | '.join(angles)} |")
    return lines


if __name__ == "__main__":
    for heading, lines in zip(("`advantage`", "`loss_aggregation`"), tables()):
        print(f"| {heading} | {' | '.join(PROBLEMS)} | favours |")
        print("| --- |" + " --- |" * (len(PROBLEMS) + 1))
        print("\n".join(lines), end="\n\n")
    print(f"| angle | problem | {' | '.join(f'G = {size}' for size in SIZES)} |")
    print("| --- | --- |" + " ---: |" * len(SIZES))
    print("\n".join(table_by_size()))
