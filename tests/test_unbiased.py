"""Whose expected gradient is that of the mean return: bench/unbiased.py, and its tables in docs/measured/methods.md."""
import itertools
import math
import statistics
from pathlib import Path

import pytest

import losses
from bench import unbiased
from runs import ROOT

UNBIASED = {"dr_grpo", "rloo", "turns"}                         # up to the length of the gradient
FAIR = {"constant_length", "sequence_sum"}                      # with these aggregations


@pytest.fixture(scope="module")
def problems():
    """{name: (a problem, its expected gradients)}"""
    made = {name: make() for name, make in unbiased.PROBLEMS.items()}
    return {name: (problem, unbiased.expected_gradients(problem)) for name, problem in made.items()}


@pytest.mark.parametrize("name", unbiased.PROBLEMS)
def test_the_unbiased_ones(problems, name):
    """The angle is 0 in every problem, and the lengths are what the formulas say."""
    problem, gradients = problems[name]
    true, G = unbiased.true_gradient(problem), problem.num_generations
    longest = max(len(episode.logps) for episodes in problem.prompts for episode in episodes)
    for advantage, aggregation in itertools.product(UNBIASED, FAIR):
        angle, ratio = unbiased.compared(gradients[advantage, aggregation], true)
        expected = (G - 1) / G if advantage == "dr_grpo" else 1
        if aggregation == "constant_length":
            expected /= longest
        assert angle < 1e-4 and ratio == pytest.approx(expected, rel=1e-6), (advantage, aggregation)


def test_every_other_one_is_biased_in_some_problem(problems):
    biased = set()
    for problem, gradients in problems.values():
        assert gradients.keys() == {*itertools.product(losses.ADVANTAGES, losses.AGGREGATIONS)}
        true = unbiased.true_gradient(problem)
        biased |= {key for key, gradient in gradients.items() if unbiased.compared(gradient, true)[0] > 1}
    unbiased_ones = {*itertools.product({*UNBIASED, "none"}, losses.AGGREGATIONS)} - {
        *itertools.product(UNBIASED, {*losses.AGGREGATIONS} - FAIR)}
    assert biased == {*itertools.product(losses.ADVANTAGES, losses.AGGREGATIONS)} - unbiased_ones


def slow_gradients(G):
    """Of the two turns, in plain numbers: every group in every order, and the gradient of each token by hand.

    recipes/grpo_process.diff adds grpo_process, and tests/test_changes.py applies it.
    """
    p, q = 0.3, 0.6                                             # of ending in turn 1, of the good end in turn 2
    episodes = [(p, [0.6], [(1 - p, 0)]), ((1 - p) * q, [0.2, 1.0], [(-p, 0), (0, 1 - q)]),
                ((1 - p) * (1 - q), [0.2, 0.1], [(-p, 0), (0, -q)])]
    found = {"true": [sum(chance * sum(rewards) * sum(g[k] for g in grads) for chance, rewards, grads in episodes)
                      for k in (0, 1)]}
    for group in itertools.product(episodes, repeat=G):
        chance = math.prod(episode[0] for episode in group)
        returns = [sum(rewards) for _, rewards, _ in group]
        every = [reward for _, rewards, _ in group for reward in rewards]
        for s, (_, rewards, grads) in enumerate(group):
            for t, gradient in enumerate(grads):
                there = [sum(own[t:]) for o, (_, own, _) in enumerate(group) if o != s and len(own) > t]
                to_go = sum(rewards[t:])
                advantages = {
                    "turns": to_go - (statistics.mean(there) if there else 0),
                    "rloo": returns[s] - (sum(returns) - returns[s]) / (G - 1),
                    "grpo": (returns[s] - statistics.mean(returns)) / (statistics.stdev(returns) + 1e-4),
                    "grpo_process": sum((reward - statistics.mean(every)) / (statistics.stdev(every) + 1e-4)
                                        for reward in rewards[t:])}
                weights = {"sequence_sum": 1 / G, "sequence_mean": 1 / G / len(rewards),
                           "token_mean": 1 / len(every)}
                for advantage, adv in advantages.items():
                    for aggregation, weight in weights.items():
                        own = found.setdefault((advantage, aggregation), [0.0, 0.0])
                        for k in (0, 1):
                            own[k] += chance * weight * adv * gradient[k]
    return found


@pytest.mark.parametrize("G", [2, 3])
def test_the_enumeration(G):
    problem = unbiased.two_turns(G)
    slow = slow_gradients(G)
    assert unbiased.true_gradient(problem).tolist() == pytest.approx(slow.pop("true"))
    gradients = unbiased.expected_gradients(problem)
    assert len(slow.keys() & gradients.keys()) >= 9
    for key in slow.keys() & gradients.keys():
        assert gradients[key].tolist() == pytest.approx(slow[key], rel=1e-5), key


def test_two_turns(problems):
    problem, gradients = problems["two turns"]
    assert unbiased.true_gradient(problem).tolist() == pytest.approx([-0.0504, 0.1512], abs=1e-6)
    assert gradients["turns", "sequence_sum"].tolist() == pytest.approx([-0.0504, 0.1512], abs=1e-6)


def test_the_tables_of_the_page():
    """python -m bench.unbiased prints what docs/measured/methods.md has."""
    advantages, aggregations = unbiased.tables()
    by_size = unbiased.table_by_size()
    page = (Path(ROOT) / "docs/measured/methods.md").read_text()
    page_lines = []
    assert (len(advantages), len(aggregations)) == (len(losses.ADVANTAGES), len(losses.AGGREGATIONS))
    for line in (*advantages, *aggregations, *by_size):
        _, name, *_ = line.split("|")
        # The page does not have the advantages that were added to a copy of this repository.
        if f"\n|{name}|" in page:
            assert f"\n{line}\n" in page, line
            page_lines.append(line)
    assert len(page_lines) >= 8 + 5 + len(by_size)
