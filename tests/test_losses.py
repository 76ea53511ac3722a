"""Every formula of losses.py against slow, obvious references in float64 loops, and by hand."""
import decimal
import itertools
import math
import statistics

import pytest
import torch

import losses
from options import critic_losses


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---------------------------------------------------------------- advantages

KINDS = ["grpo", "dr_grpo", "grpo_batch", "rloo", "reinforce++", "reinforce++_baseline", "turns", "none"]
# Those that recipes/opo_passk_remax_gdpo.diff adds, which this file tests where they have been added.
ADDED = [kind for kind in ("opo", "pass_at_k", "remax") if kind in losses.ADVANTAGES]
PROCESS = [kind for kind in ("grpo_process",) if kind in losses.ADVANTAGES]
KINDS += ADDED + PROCESS
OF_THE_GROUP = ["grpo", "dr_grpo", "rloo", "turns", *ADDED[:2], *PROCESS]    # nothing but the group's rewards matters
ONLY_ADDED = pytest.mark.skipif(not ADDED, reason="a recipe adds remax and gdpo")


def advantages(kind, rewards, G, lengths=None, greedy=None, pass_k=2):
    """As the training scripts call them: found by name, and given every keyword.

    Each score is a reward at the last token, so that all tokens of a completion have the same advantage.
    """
    lengths = torch.ones(len(rewards)).long() if lengths is None else lengths
    at_tokens = [{n - 1: r} for r, n in zip(rewards.tolist(), lengths.long().tolist())]
    more = {"lengths": lengths, "greedy": greedy, "pass_k": pass_k, "rewards": at_tokens,
            "parts": [{"a": r} for r in rewards.tolist()], "weights": {},
            "square_norms": {s: torch.ones(n) for s, n in enumerate(lengths.long().tolist())}}
    adv = losses.ADVANTAGES[kind](rewards, G, **more)
    if isinstance(adv, dict):
        assert [len(adv[s]) for s in adv] == lengths.tolist()
        assert kind == "otb" or all(len(set(own.tolist())) <= 1 for own in adv.values())
        adv = torch.stack([own[0] if len(own) else own.sum() for own in adv.values()])
    return adv


def slow_advantages(rewards, G, kind, lengths=None, greedy=None, pass_k=2):
    every = [r for r in rewards if not math.isnan(r)]
    result = []
    for start in range(0, len(rewards), G):
        group = rewards[start:start + G]
        scored = [i for i in range(G) if not math.isnan(group[i])]
        mean = sum(group[i] for i in scored) / len(scored) if scored else 0
        for i, r in enumerate(group):
            if math.isnan(r):
                result.append(0.0)
            elif kind == "none":
                result.append(0.0)
            elif kind in ("grpo", "grpo_process"):
                squares = sum((group[j] - mean) ** 2 for j in scored)
                std = math.sqrt(squares / (len(scored) - 1)) if len(scored) > 1 else 0
                result.append((r - mean) / (std + 1e-4))
            elif kind == "dr_grpo":
                result.append(r - mean)
            elif kind == "grpo_batch":
                result.append((r - mean) / (statistics.stdev(every) + 1e-4))
            elif kind in ("rloo", "turns"):
                others = [group[j] for j in scored if j != i]
                result.append(r - sum(others) / len(others) if others else 0.0)
            elif kind == "opo":
                tokens = [lengths[start + j] for j in scored]
                result.append(r - sum(n * group[j] for n, j in zip(tokens, scored)) / sum(tokens))
            elif kind == "pass_at_k":       # by drawing: every subset of pass_k, rewarded by its best
                draws = [any(group[j] > 0 for j in draw) for draw in itertools.combinations(scored, pass_k)]
                own = [any(group[j] > 0 for j in draw) for draw in itertools.combinations(scored, pass_k)
                       if i in draw]
                std = statistics.pstdev(map(float, draws)) if draws else 0
                result.append((statistics.mean(own) - statistics.mean(draws)) / std if std else 0.0)
            elif kind == "remax":
                result.append(r - greedy[start // G])
            else:
                result.append(r if kind == "reinforce++" else r - mean)
    if kind.startswith("reinforce"):        # whitened, each completion as often as it has tokens
        tokens = [a for a, r, n in zip(result, rewards, lengths) if not math.isnan(r) for _ in range(n)]
        mean, std = statistics.mean(tokens), statistics.pstdev(tokens)
        result = [0.0 if math.isnan(r) else (a - mean) / (std + 1e-8) for a, r in zip(result, rewards)]
    return result


def test_every_advantage_of_the_repository_has_a_slow_form():
    assert set(KINDS) <= losses.ADVANTAGES.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("G", [2, 4, 7])
def test_advantages(kind, G):
    rewards = torch.randn(5 * G, dtype=torch.float64)
    rewards[::3] = rewards[::3].round()
    lengths, greedy = torch.randint(1, 9, (5 * G,)), torch.randn(5, dtype=torch.float64)
    adv = advantages(kind, rewards, G, lengths, greedy)
    assert adv.tolist() == pytest.approx(
        slow_advantages(rewards.tolist(), G, kind, lengths.tolist(), greedy.tolist()))


@pytest.mark.parametrize("G", [2, 4, 7])
def test_group_std(G):
    rewards = torch.randn(5 * G, dtype=torch.float64)
    expected = [statistics.stdev(group) for group in rewards.view(-1, G).tolist()]
    assert losses.group_std(rewards, G).tolist() == pytest.approx(expected)
    nan = math.nan
    some = torch.tensor([0.1, 0.1, 0.1, 0.0, nan, 2.0, nan, nan, 3.0, nan, nan, nan])
    assert losses.group_std(some, 3).tolist() == [0, pytest.approx(math.sqrt(2)), 0, 0]
    assert losses.group_std(some, 3).dtype == torch.float64


@ONLY_ADDED
@pytest.mark.parametrize("pass_k", [1, 2, 3, 6])
def test_pass_at_k_advantages(pass_k):
    rewards = torch.tensor([float(i < right) for right in range(7) for i in range(6)], dtype=torch.float64)
    adv = advantages("pass_at_k", rewards, 6, pass_k=pass_k)
    assert adv.tolist() == pytest.approx(slow_advantages(rewards.tolist(), 6, "pass_at_k", pass_k=pass_k))
    assert adv[:6].tolist() == adv[-6:].tolist() == [0] * 6
    torch.testing.assert_close(adv.view(7, 6).sum(1), torch.zeros(7))
    if pass_k == 1:                                 # the group's reward over its deviation, not the sample's
        groups = rewards.view(7, 6)[1:6]
        expected = (groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True, correction=0)
        torch.testing.assert_close(adv.view(7, 6)[1:6], expected.float())


@ONLY_ADDED
@pytest.mark.parametrize("pass_k", [1, 2, 3, 4])
def test_pass_at_k_draws_from_scored_completions(pass_k):
    nan = math.nan
    groups = [1.0, 0, nan, 0], [nan, 0, 0, nan], [1, 1, nan, nan], [0, nan, 1, nan], [nan, nan, 0, nan]
    rewards = torch.tensor(groups, dtype=torch.float64).flatten()
    adv = advantages("pass_at_k", rewards, 4, pass_k=pass_k)
    assert adv.tolist() == pytest.approx(slow_advantages(rewards.tolist(), 4, "pass_at_k", pass_k=pass_k))
    assert adv.any() == (pass_k < 3)                # three are scored at most, one of them right


@ONLY_ADDED
def test_pass_at_k_draws_four_where_nothing_is_said():
    rewards = torch.tensor([1.0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0], dtype=torch.float64)
    expected = slow_advantages(rewards.tolist(), 6, "pass_at_k", pass_k=4)
    assert losses.ADVANTAGES["pass_at_k"](rewards, 6).tolist() == pytest.approx(expected) and any(expected)


def slow_gdpo(parts, weights, G):
    """In loops, part by part. A completion whose parts are all NaN is not scored."""
    totals = [0.0] * len(parts)
    for name in {name for own in parts for name in own}:
        for first in range(0, len(parts), G):
            scored = [i for i in range(first, first + G) if not math.isnan(parts[i].get(name, math.nan))]
            values = [parts[i][name] for i in scored]
            mean, std = sum(values) / max(len(values), 1), statistics.stdev(values) if len(values) > 1 else 0.0
            for i, value in zip(scored, values):
                totals[i] += weights.get(name, 1.0) * (value - mean) / (std + 1e-4)
    rated = [i for i, own in enumerate(parts) if not all(math.isnan(value) for value in own.values())]
    mean, std = statistics.mean(totals[i] for i in rated), statistics.stdev(totals[i] for i in rated)
    return [(total - mean) / (std + 1e-4) if i in rated else 0.0 for i, total in enumerate(totals)]


@ONLY_ADDED
def test_gdpo():
    nan = math.nan
    parts = [{"right": 1.0, "brief": -0.3}, {"right": 0.0, "brief": -0.1}, {"right": 0.0, "brief": nan},
             {"right": nan, "brief": nan}, {"right": 1.0}, {"right": 1.0, "brief": 100.0},
             {"right": 1.0, "brief": -100.0}, {"right": 1.0, "brief": 0.0},
             {"right": 0.25, "brief": 0.1}, {"right": 0.25, "brief": 0.1}, {"right": 0.25, "brief": 0.1}, {}]
    for weights in ({}, {"brief": 0.5}, {"right": -2.0, "brief": 0.0}):
        scores = torch.tensor([nan if all(map(math.isnan, own.values())) else sum(
            value for value in own.values() if not math.isnan(value)) for own in parts])
        adv = losses.ADVANTAGES["gdpo"](scores, 4, parts=parts, weights=weights)
        assert adv.tolist() == pytest.approx(slow_gdpo(parts, weights, 4), abs=1e-5)
        assert adv[8:].tolist() == [0.0] * 4 and adv[3] == 0 and adv.dtype == torch.float32
    # A part counts by its weight, whatever its spread: here (1, 0) and (0, 100) are worth the same.
    spread = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 100.0}, {"a": 0.0, "b": 0.0}]
    adv = losses.ADVANTAGES["gdpo"](torch.tensor([1.0, 100.0, 0.0]), 3, parts=spread, weights={})
    assert adv.tolist()[0] == pytest.approx(adv.tolist()[1], abs=1e-3) and adv[2] < -1
    # What was not scored, because its episode failed, is in no part's statistics.
    failed = torch.tensor([1.0, nan, 0.0])
    alone = losses.ADVANTAGES["gdpo"](failed, 3, parts=[{"a": 1.0}, {"a": 50.0}, {"a": 0.0}], weights={})
    assert alone.tolist() == pytest.approx(slow_gdpo([{"a": 1.0}, {"a": nan}, {"a": 0.0}], {}, 3), abs=1e-5)
    with pytest.raises(ValueError, match="none may be named score"):
        losses.ADVANTAGES["gdpo"](failed, 3, parts=[{"score": 1.0, "a": 2.0}] * 3, weights={})


@pytest.mark.skipif("maxrl" not in losses.ADVANTAGES, reason="README.md adds maxrl")
def test_maxrl():
    """Its gradient is the mean of the scores' gradients over right completions, minus that over all."""
    groups = [[1.0, 0, 0, 0], [1, 1, 0, math.nan], [0, 0, 0, 0], [1, 1, 1, 1], [math.nan] * 4]
    adv = losses.ADVANTAGES["maxrl"](torch.tensor(groups).flatten(), 4).view(5, 4).tolist()
    for group, own in zip(groups, adv):
        scored = [score for score in group if not math.isnan(score)]
        for score, advantage in zip(group, own):
            right = score == 1
            counts = not math.isnan(score) and sum(scored)
            expected = right * len(scored) / sum(scored) - 1 if counts else 0.0
            assert advantage == pytest.approx(expected)


def test_one_scored_completion_in_the_batch_has_no_spread_and_two_have_one():
    rewards = torch.tensor([math.nan, 3, math.nan, math.nan])
    assert advantages("grpo_batch", rewards, 2).tolist() == [0, 0, 0, 0]
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    adv = advantages("grpo_batch", torch.tensor([1.0, 0]), 2)
    assert adv.tolist() == pytest.approx([expected, -expected])


@pytest.mark.parametrize("kind", losses.ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_advantages_are_float32_whatever_the_scores_are(kind, dtype):
    whole, lengths = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0]), torch.tensor([1, 2, 3, 4] * 2)
    adv = advantages(kind, whole.to(dtype), 4, lengths, torch.zeros(2, dtype=dtype))
    assert adv.dtype == torch.float32
    torch.testing.assert_close(adv.float(), advantages(kind, whole, 4, lengths, torch.zeros(2)))
    if dtype.is_floating_point:
        adv = advantages(kind, torch.tensor([1.0, math.nan, 0, 2], dtype=dtype), 2, lengths[:4], torch.zeros(2))
        assert adv.shape == (4,) and adv[1] == 0


@pytest.mark.parametrize("kind, expected", [
    ("grpo", [1.5, -0.5, -0.5, -0.5]),
    ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
    ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
    *[("opo", [0.9, -0.1, -0.1, -0.1]),             # the right one has a tenth of the tokens
      ("pass_at_k", [1, -1 / 3, -1 / 3, -1 / 3])][:len(ADDED)]])    # with k = 2 half of the six draws succeed
def test_advantages_by_hand(kind, expected):
    lengths = torch.tensor([2, 6, 6, 6])
    adv = advantages(kind, torch.tensor([1.0, 0, 0, 0]), 4, lengths)
    assert adv.tolist() == pytest.approx(expected, abs=4e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_without_spread_or_score(kind):
    nan = math.nan
    rewards = torch.tensor([1.0, 1, 1, 0, nan, 2, nan, nan, 3, nan, nan, nan], dtype=torch.float64)
    lengths, greedy = torch.arange(1, 13), torch.tensor([1.0, 0, 1, 5], dtype=torch.float64)
    adv = advantages(kind, rewards, 3, lengths, greedy).tolist()
    assert adv == pytest.approx(slow_advantages(rewards.tolist(), 3, kind, lengths.tolist(), greedy.tolist()))
    assert adv[4] == 0 and adv[6:8] == [0, 0] and adv[9:] == [0, 0, 0] and all(map(math.isfinite, adv))
    if kind in OF_THE_GROUP:
        assert adv[:3] == [0, 0, 0] and adv[8] == 0


def slow_turns(rewards, lengths, unscored, G):
    """In loops, token by token: what is still to come, minus what was still to come for others at that turn."""
    def turn(s, token):
        return sum(t < token for t in rewards[s])

    def to_go(s, token):
        return sum(reward for t, reward in rewards[s].items() if t >= token)

    result = {s: [0.0] * length for s, length in enumerate(lengths)}
    for s, length in enumerate(lengths):
        others = [o for o in range(s - s % G, s - s % G + G) if o != s and o not in unscored]
        if s in unscored or not others:
            continue
        for token in range(length):
            there = []
            for o in others:
                reached = [t for t in range(lengths[o]) if turn(o, t) == turn(s, token)]
                if reached:
                    there.append(to_go(o, reached[0]))
            result[s][token] = to_go(s, token) - (sum(there) / len(there) if there else 0.0)
    return result


@pytest.mark.parametrize("G", [2, 3, 6])
def test_turns(G):
    """Against loops, for rewards at any tokens, in any order, and completions without a score."""
    lengths = torch.randint(1, 12, (20 * G,))
    rewards, unscored = [], set()
    for s, length in enumerate(lengths.tolist()):
        chosen = torch.randperm(length)[:torch.randint(0, length + 1, ())].tolist()
        rewards.append({token: torch.randn(()).double().item() for token in chosen})
        if torch.rand(()) < 0.25:
            unscored.add(s)
    scores = torch.tensor([math.nan if s in unscored else sum(own.values()) for s, own in enumerate(rewards)])
    given = [dict(own) for own in rewards]
    for s in unscored:                                            # as the scorer leaves them
        rewards[s] = {lengths[s].item() - 1: math.nan}
    adv = losses.ADVANTAGES["turns"](scores, G, lengths=lengths, rewards=rewards)
    expected = slow_turns(given, lengths.tolist(), unscored, G)
    assert len(unscored) > 2 and adv.keys() == expected.keys()
    for s, own in adv.items():
        assert own.dtype == torch.float32 and own.tolist() == pytest.approx(expected[s], abs=1e-6), s


def test_turns_by_hand():
    """Two turns and one; then an answer that ends where another one goes on; then one that is compared with none."""
    lengths = torch.tensor([3, 2, 1, 4, 2, 3])
    rewards = [{0: 1.0, 2: 2.0}, {1: 1.0}, {0: 0.5}, {0: 0.5, 2: 3.0}, {1: 1.0}, {2: math.nan}]
    scores = torch.tensor([3.0, 1, 0.5, 3.5, 1, math.nan])
    adv = losses.ADVANTAGES["turns"](scores, 2, lengths=lengths, rewards=rewards)
    assert [own.tolist() for own in adv.values()] == [
        [2, 2, 2], [-2, -2], [-3], [3, 3, 3, 0], [0, 0], [0, 0, 0]]
    # The last token of an answer that stops after its reward is compared with the turn of one that goes on.
    rewards = [{0: 0.5}, {0: 0.5, 1: 3.0}]
    adv = losses.ADVANTAGES["turns"](scores[2:4], 2, lengths=torch.tensor([2, 3]), rewards=rewards)
    assert [own.tolist() for own in adv.values()] == [[-3, -3], [3, 3, 0]]


def test_what_is_taken_off_a_score_is_taken_off_its_last_reward():
    rewards = [{3: 0.25, 1: 0.5}, {2: 1.0}]
    scores = torch.tensor([0.5, 1.0], dtype=torch.float64)
    adv = losses.ADVANTAGES["turns"](scores, 2, lengths=torch.tensor([4, 3]), rewards=rewards)
    assert adv[0].tolist() == [-0.5, -0.5, 0, 0] and adv[1].tolist() == [0.5] * 3
    assert rewards == [{3: 0.25, 1: 0.5}, {2: 1.0}]             # the rollouts keep what was scored
    # Where a script sets scores alone, they belong to the last tokens.
    adv = losses.ADVANTAGES["turns"](scores, 2, lengths=torch.tensor([2, 1]), rewards=[{}, {}])
    assert adv[0].tolist() == [-0.5, -0.5] and adv[1].tolist() == [0.5]


@ONLY_ADDED
def test_a_greedy_completion_without_a_score_is_no_baseline():
    greedy = torch.tensor([math.nan, 1.0])
    adv = advantages("remax", torch.tensor([0.0, 2, 0, 2]), 2, torch.ones(4), greedy)
    assert adv.tolist() == [0, 0, -1, 1]


@pytest.mark.parametrize("kind", losses.ADVANTAGES)
def test_nothing_scored_teaches_nothing(kind):
    nothing = torch.full((4,), math.nan)
    adv = advantages(kind, nothing, 2, torch.ones(4).long(), torch.ones(2))
    assert not adv.any() and not losses.group_std(nothing, 2).any()


@pytest.mark.parametrize("kind", losses.ADVANTAGES)
def test_completions_without_tokens_have_finite_advantages(kind):
    rewards, lengths = torch.tensor([1.0, 0, 0, 1]), torch.tensor([0, 3, 2, 0])
    for tokens in (lengths, 0 * lengths):
        for pass_k in (1, 2, 4):
            assert advantages(kind, rewards, 2, tokens, torch.ones(2), pass_k).isfinite().all()


@pytest.mark.parametrize("kind, epsilon, divisor", [
    ("grpo", 1e-4, 3), ("grpo_batch", 1e-4, 3), ("reinforce++", 1e-8, 4), ("reinforce++_baseline", 1e-8, 4)])
def test_an_epsilon_damps_a_small_spread(kind, epsilon, divisor):
    scores = torch.tensor([0, 2 * epsilon, 0, 2 * epsilon], dtype=torch.float64)
    damped = epsilon / (math.sqrt(4 / divisor) * epsilon + epsilon)
    assert advantages(kind, scores, 4, torch.ones(4)).tolist() == pytest.approx([-damped, damped] * 2)


def test_a_single_token_in_the_batch():
    scores, lengths = torch.tensor([3.0, 1.0], dtype=torch.float64), torch.tensor([1, 0])
    assert not ADDED or advantages("opo", scores, 2, lengths).tolist() == [0, -2]
    for kind in ("reinforce++", "reinforce++_baseline"):
        assert advantages(kind, scores, 2, lengths)[0] == 0


@pytest.mark.parametrize("kind", OF_THE_GROUP)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.99, 2.7])
@pytest.mark.parametrize("G", [3, 8, 10])
def test_equal_rewards_give_exactly_nothing(kind, reward, G):
    lengths = torch.randint(1, 9, (G,))
    for dtype in (torch.float32, torch.float64):                  # in either of them a mean may round
        rewards = torch.full((G,), reward, dtype=dtype)
        for pass_k in (1, 2):
            assert not advantages(kind, rewards, G, lengths, pass_k=pass_k).any()
        assert losses.group_std(rewards, G).tolist() == [0]


def test_a_group_never_sees_another():
    rewards = torch.randn(12)
    moved = rewards.clone()
    moved[8:] += 5
    lengths = torch.randint(1, 9, (12,))
    for kind in OF_THE_GROUP:
        adv = advantages(kind, rewards, 4, lengths)
        assert adv[:8].any()
        torch.testing.assert_close(adv[:8], advantages(kind, moved, 4, lengths)[:8])


@pytest.mark.parametrize("length, penalty", [(1, 0), (12, 0), (13, -0.25), (14, -0.5), (16, -1), (20, -1)])
def test_overlong_penalty(length, penalty):
    """Eq. 13 of DAPO with L_max 16 and L_cache 4: nothing up to 12, then linear to -1 at 16."""
    assert losses.overlong_penalty(torch.tensor([length]), 16, 4).tolist() == [penalty]


# ---------------------------------------------------------------- aggregation

def test_the_aggregations_are_these():
    assert losses.AGGREGATIONS == ("token_mean", "sequence_mean", "constant_length", "sequence_sum",
                                   "prompt_mean")


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_sequence_weights(aggregation):
    """Of all completions of four prompts, and of an update that leaves out some, and one prompt whole."""
    lengths = [3, 1, 5, 2, 4, 7, 6, 2]
    for update in ([*range(8)], [6, 0, 3, 1, 7], [2], []):
        token_losses = {s: torch.randn(lengths[s], dtype=torch.float64) for s in update}
        sums = {s: sum(x.item() for x in own) for s, own in token_losses.items()}
        if aggregation == "token_mean":
            expected = sum(sums.values()) / sum(lengths[s] for s in update) if update else 0
        elif aggregation == "prompt_mean":
            prompts = [own for p in range(4) if (own := [s for s in (2 * p, 2 * p + 1) if s in update])]
            expected = sum(sum(sums[s] for s in own) / sum(lengths[s] for s in own) / len(prompts)
                           for own in prompts)
        else:
            divisor = {"sequence_mean": lambda s: lengths[s], "constant_length": lambda s: 8,
                       "sequence_sum": lambda s: 1}[aggregation]
            expected = sum(sums[s] / divisor(s) / len(update) for s in update)
        weight = losses.sequence_weights(torch.tensor(lengths), aggregation, update, 2, 8)
        assert weight.dtype == torch.float32 and weight.shape == (8,)
        total = sum((weight[s].double() * own).sum().item() for s, own in token_losses.items())
        assert total == pytest.approx(expected, rel=1e-6)


def test_a_prompt_with_a_single_token_counts_as_a_prompt():
    weight = losses.sequence_weights(torch.tensor([1, 0, 3, 1]), "prompt_mean", [0, 1, 2, 3], 2, 8)
    assert weight.tolist() == [1 / 2, 1 / 2, 1 / 8, 1 / 8]


def test_rollouts_that_are_no_groups_are_refused_in_a_sentence():
    """Where groups are needed: the weights of other aggregations are those of any rows."""
    lengths, message = torch.tensor([3, 1, 5]), "3 rollouts are not groups of num_generations=2: each prompt has"
    for kind in ("grpo", "dr_grpo", "grpo_batch", "rloo", "reinforce++_baseline"):
        with pytest.raises(ValueError, match=message):
            losses.ADVANTAGES[kind](torch.tensor([1.0, 0.0, 1.0]), 2, lengths=lengths)
    with pytest.raises(ValueError, match=message):
        losses.sequence_weights(lengths, "prompt_mean", [0, 1, 2], 2, 8)
    for kind, expected in (("token_mean", [1 / 9] * 3), ("sequence_mean", [1 / 9, 1 / 3, 1 / 15])):
        assert losses.sequence_weights(lengths, kind, [0, 1, 2], 2, 8).tolist() == pytest.approx(expected)


# ---------------------------------------------------------------- policy loss

KINDS_OF_LOSS = ["clip", "gspo", "gmpo", "cispo", "sapo", "gpg", "dppo"]
# Those that a recipe adds are tested where it has been applied, as tests/test_docs.py does.
MARKED = [kind for kind in ("clip_cov", "kl_cov") if kind in losses.LOSSES]
KINDS_OF_LOSS += MARKED
CLIPPED = ["clip", "gspo", "gmpo", "clip_cov", "dppo"]            # on both sides, as adv pushes
LENGTHS = [3, 1, 60, 20, 116]                                     # of the sequences of the tests below


def mean(values):
    """The mean over its sequence at each token, as MicroBatch.mean gives it."""
    return torch.cat([part.mean().expand(len(part)) for part in values.split(LENGTHS)])


def sequence_lengths():
    """The length of its sequence at each token, as MicroBatch.sequence_lengths gives it."""
    lengths = torch.tensor(LENGTHS)
    return lengths.repeat_interleave(lengths)


def policy_loss(kind, logp, old, adv, mean=None, epsilon=0.2, epsilon_high=0.2, marked=None):
    """As the training scripts call them: found by name, and given every keyword.

    Only dppo reads the engine's logprobs, and it reads no others: the ones it should not read are NaN.
    """
    old, engine = (old * math.nan, old) if kind == "dppo" else (old, old * math.nan)
    return losses.LOSSES[kind](logp, old, adv, mean=mean, lengths=sequence_lengths, engine_logp=engine,
                               epsilon=epsilon, epsilon_high=epsilon_high, marked=marked)


def slow_policy_loss(logp, old, adv, marked, low, high, kind):
    """Of one sequence, in plain numbers: the loss at each token, clipped low, clipped high."""
    ratios = [math.exp(p - o) for p, o in zip(logp, old)]
    if kind == "gspo":
        ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
    down = [r < 1 - low and a < 0 and kind in CLIPPED for r, a in zip(ratios, adv)]
    up = [r > 1 + high and (a > 0 and kind in CLIPPED or kind == "cispo") for r, a in zip(ratios, adv)]
    bounded = [min(max(r, 1 - low), 1 + high) for r in ratios]
    if kind == "dppo":
        gaps = [math.exp(p) - math.exp(o) for p, o in zip(logp, old)]
        down = [d < -low and a < 0 for d, a in zip(gaps, adv)]
        up = [d > high and a > 0 for d, a in zip(gaps, adv)]
        loss = [0.0 if d or u else -min(r, 20) * a * p for d, u, r, a, p in zip(down, up, ratios, adv, logp)]
    elif kind == "gmpo":
        kept = [b if d or u else r for r, b, d, u in zip(ratios, bounded, down, up)]
        loss = [-a * math.prod(kept) ** (1 / len(kept)) for a in adv]
    elif kind == "sapo":
        soft = lambda r, t: 4 / t / (1 + math.exp(-t * (r - 1)))
        loss = [-a * soft(r, 1.0 if a > 0 else 1.05) for r, a in zip(ratios, adv)]
    elif kind == "gpg":
        loss = [-a * p for p, a in zip(logp, adv)]
    elif kind == "cispo":
        loss = [-min(r, 1 + high) * a * p for r, a, p in zip(ratios, adv, logp)]
    elif kind == "kl_cov":
        loss = [-r * a + (abs(p - o) if m else 0) for r, a, m, p, o in zip(ratios, adv, marked, logp, old)]
    else:
        loss = [0.0 if m and kind == "clip_cov" else -min(r * a, b * a)
                for r, a, b, m in zip(ratios, adv, bounded, marked)]
    return loss, down, up


def test_every_loss_of_the_repository_has_a_slow_form():
    assert set(KINDS_OF_LOSS) <= losses.LOSSES.keys()


@pytest.mark.parametrize("kind", KINDS_OF_LOSS)
def test_policy_loss(kind):
    old = -torch.rand(200, dtype=torch.float64) * 3
    drift = torch.cat([torch.full((n,), d).double() for n, d in zip(LENGTHS, (0.0, 0.0, 0.0, 0.3, -0.1))])
    logp = (old + drift + torch.randn(200, dtype=torch.float64) * 0.3).requires_grad_()
    adv = torch.cat([torch.full((n,), a).double() for n, a in zip(LENGTHS, (1.3, -0.7, 0.0, 0.6, -1.0))])
    weight, marked = torch.rand(200, dtype=torch.float64), torch.rand(200) < 0.1
    if kind in ("gspo", "gmpo"):                                  # of tokens: below
        weight = mean(weight)
    low, high = (0.02, 0.03) if kind == "gspo" else (0.2, 0.28)
    if kind == "dppo":                                            # unlikely tokens, one of which is far up
        low, high, old[:20] = 0.1, 0.15, old[:20] - 4
        with torch.no_grad():
            logp[0] = old[0] + 3.5
    loss, down, up = policy_loss(kind, logp, old, adv, mean, low, high, marked=marked)
    (weight * loss).sum().backward()
    slow = lambda values: [slow_policy_loss(*sequence, low, high, kind) for sequence in zip(
        *([part.tolist() for part in x.split(LENGTHS)] for x in (values, old, adv, marked)))]
    expected, expected_down, expected_up = (sum(column, []) for column in zip(*slow(logp.detach())))
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert down.tolist() == expected_down and up.tolist() == expected_up
    assert down.dtype == up.dtype == torch.bool
    assert any(expected_down) == (kind in CLIPPED) and any(expected_up) == (kind in [*CLIPPED, "cispo"])
    total = lambda values: sum(w * x for w, x in zip(weight.tolist(), sum((s[0] for s in slow(values)), [])))
    held = total
    if kind in ("cispo", "dppo"):                                 # its weight has no gradient: hold it
        most = 20 if kind == "dppo" else 1 + high
        weights = [0 if kind == "dppo" and (d or u) else min(math.exp(p - o), most)
                   for p, o, d, u in zip(logp.tolist(), old.tolist(), expected_down, expected_up)]
        held = lambda values: sum(-w * c * a * p for w, c, a, p in zip(weight.tolist(), weights, adv.tolist(),
                                                                       values.tolist()))
    for c in range(200):                                          # by differences, one token after another
        step = torch.zeros(200, dtype=torch.float64)
        step[c] = 1e-6
        slope = (held(logp.detach() + step) - held(logp.detach() - step)) / 2e-6
        assert logp.grad[c].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("kind", losses.LOSSES)
def test_extreme_ratios_stay_finite(kind):
    logp = torch.tensor([-300.0, 0, -1, -1e4] * 50, requires_grad=True)
    old = torch.tensor([0.0, -300, -1, 0] * 50)
    adv = torch.cat([torch.full((n,), float(a)) for n, a in zip(LENGTHS, (1, -1, 2, -2, 0))])
    loss, _, _ = policy_loss(kind, logp, old, adv, mean, 0.2, 0.28, marked=torch.arange(200) < 9)
    loss.sum().backward()
    assert loss.isfinite().all() and logp.grad.isfinite().all()


def test_luspo_is_gspo_with_a_sum_over_the_tokens():
    """The paper's objective and its gradient: a sequence's clipped ratio times its advantage and its length."""
    old = -torch.rand(200, dtype=torch.float64)
    logp = (old + 0.1 * torch.randn(200, dtype=torch.float64)).requires_grad_()
    advs = torch.tensor([1.3, -0.7, 0.4, 0.6, -1.0], dtype=torch.float64)
    adv = advs.repeat_interleave(torch.tensor(LENGTHS))
    weight = losses.sequence_weights(torch.tensor(LENGTHS), "sequence_sum", range(5), 1, 999).double()
    loss, low, high = policy_loss("gspo", logp, old, adv, mean, 0.01, 0.02)
    assert low.any() and high.any() and not (low | high).all()
    grad, = torch.autograd.grad((weight.repeat_interleave(torch.tensor(LENGTHS)) * loss).sum(), logp)
    objective = 0.0
    for new, before, a in zip(logp.split(LENGTHS), old.split(LENGTHS), advs):
        ratio = (new - before).mean().exp()
        objective = objective + torch.min(ratio * a, ratio.clamp(0.99, 1.02) * a) * len(new) / len(LENGTHS)
    expected, = torch.autograd.grad(-objective, logp)
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["gspo", "gmpo"])
def test_a_weight_of_a_token_weighs_its_own_gradient(kind):
    """GSPO-token (Zheng et al. 2025, 4.3): the sequence's ratio, the gradient of the token's own logprob."""
    old = -torch.rand(200, dtype=torch.float64)
    logp = (old + 0.3 * torch.randn(200, dtype=torch.float64)).requires_grad_()
    adv = torch.cat([torch.full((n,), a).double() for n, a in zip(LENGTHS, (1.3, -0.7, 0.0, 2.0, -1.0))])
    weight = torch.rand(200, dtype=torch.float64)
    (weight * policy_loss(kind, logp, old, adv, mean, 0.2, 0.28)[0]).sum().backward()
    expected = []
    for p, o, a, w in zip(*(x.split(LENGTHS) for x in (logp.detach(), old, adv, weight))):
        ratios = [math.exp(x - y) for x, y in zip(p.tolist(), o.tolist())]
        outside = [r > 1.28 if a[0] > 0 else r < 0.8 and a[0] < 0 for r in ratios]
        kept = [min(max(r, 0.8), 1.28) if out and kind == "gmpo" else r for r, out in zip(ratios, outside)]
        whole = math.prod(kept) ** (1 / len(kept))
        moving = [not out for out in outside] if kind == "gmpo" else [
            not (whole > 1.28 if a[0] > 0 else whole < 0.8 and a[0] < 0)] * len(kept)
        expected += [-x * whole * a[0].item() * m for x, m in zip(w.tolist(), moving)]
    assert logp.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("ratio, adv, loss, gradient", [
    (1.5, 1.0, -1.28, 0.0),       # already far up and still pushed up: clipped
    (1.5, -1.0, 1.5, 1.5),        # far up but pushed down: not clipped
    (0.5, 1.0, -0.5, -0.5),       # far down but pushed up: not clipped
    (0.5, -1.0, 0.8, 0.0),        # already far down and still pushed down: clipped
    (1.0, 2.0, -2.0, -2.0)])      # on policy: the plain policy gradient
def test_clip_by_hand(ratio, adv, loss, gradient):
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    value = policy_loss("clip", logp, torch.zeros(1, dtype=torch.float64),
                        torch.tensor([adv], dtype=torch.float64), None, 0.2, 0.28)[0]
    value.backward()
    assert (value.item(), logp.grad.item()) == pytest.approx((loss, gradient))


def test_a_ratio_at_a_bound_is_not_beyond_it():
    """The bounds are made of ratios, exactly, and each token is a sequence of its own."""
    log_ratio, adv = torch.tensor([[-0.25, 0.25, 1.0], [-1.0, 1, -1]], dtype=torch.float64)
    low, high, _ = log_ratio.exp().tolist()
    for kind in ("clip", "gspo", "gmpo", "cispo", *MARKED[:1]):
        logp = log_ratio.clone().requires_grad_()
        loss, *clipped = policy_loss(kind, logp, 0 * log_ratio, adv, lambda x: x, 1 - low, high - 1,
                                     marked=adv > 2)
        loss[:2].sum().backward()
        assert 1 - (1 - low) == low and 1 + (high - 1) == high
        assert not clipped[0].any() and clipped[1].tolist() == [False, False, kind == "cispo"]
        assert logp.grad[:2].tolist() == pytest.approx([low, -high])
    for correction in ("token_mask", "sequence_mask", "geometric_mask"):
        weight = losses.CORRECTIONS[correction](log_ratio, 0 * log_ratio, mean=lambda x: x, lengths=lambda: 1,
                                                cap=high, low=low, high=high)
        assert weight.bool().tolist() == [True, True, False] and weight.dtype == log_ratio.dtype


@pytest.mark.skipif("dual_clip" not in losses.LOSSES, reason="a recipe adds dual_clip")
@pytest.mark.parametrize("ratio, adv, loss, gradient, high", [
    (2.9, -1.0, 2.9, 2.9, False),     # pushed down, within the second bound
    (3.1, -1.0, 3.0, 0.0, True),      # beyond it: bounded, and without gradient
    (1e4, -2.0, 6.0, 0.0, True),
    (3.1, 0.0, 0.0, 0.0, False),      # nothing to bound
    (3.1, 1.0, -1.28, 0.0, True),     # a positive advantage knows the first bound alone
    (0.5, -1.0, 0.8, 0.0, False)])    # and the lower bound stays
def test_dual_clip_by_hand(ratio, adv, loss, gradient, high):
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    value, _, clipped = policy_loss("dual_clip", logp, torch.zeros(1, dtype=torch.float64),
                                    torch.tensor([adv], dtype=torch.float64), None, 0.2, 0.28)
    value.backward()
    assert (value.item(), logp.grad.item()) == pytest.approx((loss, gradient)) and clipped.item() == high


def test_all_losses_are_the_policy_gradient_at_ratio_one():
    for kind in KINDS_OF_LOSS:
        logp = (-torch.rand(200)).requires_grad_()
        adv = torch.cat([torch.full((n,), a) for n, a in zip(LENGTHS, torch.randn(5).tolist())])
        marked = torch.rand(200) < 0.1
        policy_loss(kind, logp, logp.detach(), adv, mean, marked=marked)[0].sum().backward()
        torch.testing.assert_close(logp.grad, -adv * ~(marked & (kind == "clip_cov")))


@pytest.mark.parametrize("log_ratio, bounded", [(19.0, 19.0), (21.0, 20.0), (-19.0, -19.0), (-21.0, -20.0)])
def test_log_ratios_are_bounded_at_20(log_ratio, bounded):
    """Pushed back towards a ratio of 1, and with a wide bound for cispo: no other clipping acts."""
    one = torch.ones(1, dtype=torch.float64)
    adv, expected = -math.copysign(1, log_ratio), math.exp(bounded)
    loss_of = lambda kind: policy_loss(kind, log_ratio * one, 0 * one, adv * one, lambda x: x, 0.2, 1e12,
                                       marked=one > 0)[0].item()
    for kind in ("clip", "gspo", "gmpo"):
        assert loss_of(kind) == pytest.approx(-expected * adv, rel=1e-12)
    assert loss_of("cispo") == pytest.approx(-expected * adv * log_ratio, rel=1e-12)
    t = 1.0 if adv > 0 else 1.05
    assert loss_of("sapo") == pytest.approx(-4 / t / (1 + math.exp(-t * (expected - 1))) * adv, rel=1e-12)
    if log_ratio < 0:                                             # above, dppo's ratio is at most 20
        assert loss_of("dppo") == pytest.approx(-expected * adv * log_ratio, rel=1e-12)
    # Of two tokens of a sequence, each is bounded by itself.
    two = policy_loss("gspo", torch.stack([log_ratio * one, 0 * one]), torch.zeros(2, 1), adv * one,
                      lambda x: x.mean(0, keepdim=True).expand(x.shape), 0.2, 1e12)[0]
    assert two.flatten().tolist() == pytest.approx([-math.exp(bounded / 2) * adv] * 2, rel=1e-12)
    if MARKED:
        assert loss_of("kl_cov") == pytest.approx(-expected * adv + abs(bounded), rel=1e-12)
    for correction, length in (("token_truncate", 1), ("token_mask", 1), ("sequence_truncate", 2),
                               ("sequence_mask", 2)):
        weight = losses.CORRECTIONS[correction](log_ratio / length * one, 0 * one, mean=lambda x: x,
                                                lengths=lambda: length * one, cap=1e12, low=0.0, high=1e12)
        assert weight.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.skipif(not MARKED, reason="a recipe adds kl_cov")
def test_covariance_marks():
    logps = [-3 * torch.rand(n, dtype=torch.float64) for n in 10 * LENGTHS]
    adv = 3 * torch.randn(50, dtype=torch.float64)

    def marks(kind, seed=0, share=0.0104):
        found = losses.covariance_marks(logps, adv, kind, share, torch.Generator().manual_seed(seed))
        assert [len(part) for part in found] == 10 * LENGTHS and found[0].dtype == torch.bool
        return torch.cat(found).nonzero()[:, 0].tolist()

    tokens = [(p, a) for part, a in zip(logps, adv.tolist()) for p in part.tolist()]
    p, a = (sum(column) / 2000 for column in zip(*tokens))
    covariance = [(x - p) * (y - a) for x, y in tokens]
    assert marks("kl_cov") == sorted(sorted(range(2000), key=lambda c: covariance[c])[-20:])
    eligible = {c for c in range(2000) if 1 < covariance[c] < 5}
    assert min(covariance) < -1 and max(covariance) > 5 and 20 < len(eligible) < 1500
    first, second = marks("clip_cov"), marks("clip_cov", seed=1)
    assert len(first) == 20 and set(first) | set(second) <= eligible
    assert first != second == marks("clip_cov", seed=1)
    assert set(marks("clip_cov", share=0.9)) == eligible          # there are no more
    assert len(marks("kl_cov", share=0.0)) == 1 and len(marks("kl_cov", share=1.0)) == 2000
    adv = torch.zeros(50, dtype=torch.float64)
    assert marks("clip_cov") == []                                # no covariance, nothing to clip
    for size, count in ((1.0, 0), (2.0, 2), (5.0, 0)):            # covariances of exactly 1, 2 and 5
        adv = torch.tensor([size, -size])
        found = losses.covariance_marks(torch.tensor([[-1.0], [-3]]), adv, "clip_cov", 1.0, torch.Generator())
        assert torch.cat(found).sum() == count
    for kind in ("clip_cov", "kl_cov"):                           # no sequence, no marks
        assert list(losses.covariance_marks([], adv[:0], kind, 0.1, torch.Generator())) == []


# ---------------------------------------------------------------- the gap between engine and trainer

@pytest.mark.parametrize("correction", losses.CORRECTIONS)
def test_correction_weights(correction):
    old, sampled = (-torch.rand(200, dtype=torch.float64) * 3 for _ in range(2))
    length = torch.cat([torch.full((n,), float(n), dtype=torch.float64) for n in LENGTHS])
    sampled[:64] = old[:64] + 0.1 * torch.randn(64, dtype=torch.float64)
    sampled[84:] -= 0.5                                           # the last sequence: too likely by far
    bounds = {"cap": 1.1, "low": 0.8, "high": 1.3}
    got = losses.CORRECTIONS[correction](old, sampled, mean=mean, lengths=lambda: length, **bounds)
    truncation, _, mask = correction.partition(",")
    if truncation.endswith("mask"):
        truncation, mask = "", correction
    expected = []
    for o, s in zip(old.split(LENGTHS), sampled.split(LENGTHS)):
        ratios = [math.exp(a - b) for a, b in zip(o.tolist(), s.tolist())]
        product = math.prod(ratios)
        by_level = {"token": ratios, "sequence": [product] * len(ratios),
                    "geometric": [product ** (1 / len(ratios))] * len(ratios)}
        for c in range(len(ratios)):
            weight = 1.0
            if truncation.endswith("truncate"):
                weight = min(by_level[truncation.split("_")[0]][c], 1.1)
            if mask:
                ratio = by_level[mask.split("_")[0]][c]
                # Next to a truncation a mask only drops tokens: both ratios together would correct twice.
                if not truncation and mask != "geometric_mask":
                    weight = ratio
                if not 0.8 <= ratio <= 1.3:
                    weight = 0.0
            expected.append(weight)
    assert got.tolist() == pytest.approx(expected) and (len(set(expected)) > 1) == (correction != "none")
    on_policy = losses.CORRECTIONS[correction](old, old, mean=mean, lengths=lambda: length, **bounds)
    assert on_policy.tolist() == [1.0] * 200


def test_extreme_gaps_stay_finite():
    old, sampled = torch.tensor([-300.0, 0] * 100), torch.tensor([0.0, -300] * 100)
    for correction in losses.CORRECTIONS:
        weight = losses.CORRECTIONS[correction](old, sampled, mean=mean, lengths=lambda: mean(old), cap=2.0,
                                                low=0.5, high=2.0)
        assert weight.isfinite().all()


@pytest.mark.parametrize("correction, gap, expected", [
    ("geometric_mask", 0.005, 1.0),         # the sequence's product is e^0.58 and does not count
    ("geometric_mask", 0.015, 0.0),
    ("sequence_mask", 0.005, 0.0),
    ("sequence_truncate", 0.005, 1.003),
    ("token_mask", 0.005, math.exp(0.005)),
    # Both thresholds act at the same time: the mask's are of the geometric mean, the cap is of each token.
    ("token_truncate,geometric_mask", 0.005, 1.003),
    ("token_truncate,geometric_mask", 0.002, math.exp(0.002)),
    ("token_truncate,geometric_mask", 0.015, 0.0),
    ("token_truncate,sequence_mask", 0.002, 0.0),
    ("sequence_truncate,token_mask", 0.005, 1.003)])
def test_corrections_of_a_long_sequence(correction, gap, expected):
    sampled = torch.zeros(200, dtype=torch.float64)
    length = torch.tensor(LENGTHS, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
    got = losses.CORRECTIONS[correction](sampled + gap, sampled, mean=mean, lengths=lambda: length, cap=1.003,
                                         low=0.99, high=1.01)
    assert got[-116:].tolist() == pytest.approx([expected] * 116)


def test_the_corrections_are_these():
    assert tuple(losses.CORRECTIONS) == (
        "none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "geometric_mask",
        "token_truncate,token_mask", "token_truncate,sequence_mask", "token_truncate,geometric_mask",
        "sequence_truncate,token_mask", "sequence_truncate,sequence_mask", "sequence_truncate,geometric_mask")


# ---------------------------------------------------------------- KL

KL_ESTIMATORS = ("k1", "k2", "k3", "k3+", "k3_is")

@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_kl_value_and_gradient(kind):
    logp = (-torch.rand(100, dtype=torch.float64) * 3).requires_grad_()
    ref, old = (-torch.rand(100, dtype=torch.float64) * 3 for _ in range(2))
    kl = losses.kl_penalty(logp, ref, kind, old)
    kl.sum().backward()
    for p, r, o, value, gradient in zip(*(x.tolist() for x in (logp, ref, old, kl, logp.grad))):
        ratio = math.exp(r) / math.exp(p)                                  # reference over policy
        moved = math.exp(p - o)
        expected = {"k1": (-math.log(ratio), 1.0), "k2": (math.log(ratio) ** 2 / 2, -math.log(ratio)),
                    "k3": (ratio - 1 - math.log(ratio), 1 - ratio),
                    "k3+": (ratio - 1 - math.log(ratio), -math.log(ratio)),
                    "k3_is": (moved * (ratio - 1 - math.log(ratio)), -moved * math.log(ratio))}[kind]
        assert (value, gradient) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("d", [-1000.0, -70.0, -1.0, 0.0, 1.0, 59.0, 61.0, 1000.0])
def test_kl_of_distant_policies(d):
    """exp(d) is held at e^60, and has no gradient beyond; all else goes on as the formulas say."""
    k3, slope = math.exp(min(d, 60)) - 1 - d, 1 - (math.exp(d) if d < 60 else 0)
    for kind, value, gradient in [("k1", -d, 1), ("k2", d * d / 2, -d), ("k3", k3, slope), ("k3+", k3, -d)]:
        logp = torch.tensor([-5.0], dtype=torch.float64, requires_grad=True)
        kl = losses.kl_penalty(logp, logp.detach() + d, kind)
        kl.backward()
        assert (kl.item(), logp.grad.item()) == pytest.approx((value, gradient), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("moved", [-60.0, -40.5, -20.25, -19.75, -1.0, 0.0, 1.0, 19.75])
def test_k3_is_of_a_policy_that_has_left_its_samples(moved, dtype):
    """ratio * k3 in 50 digits: exact also where the ratio is e^-60 and exp(d) is e^60."""
    for d in (-60.0, -30.0, -20.5, -1.0, -0.25, 0.0, 0.25, 1.0, 20.5, 30.0, 40.0, 60.0):
        logp = torch.tensor([moved - 70], dtype=dtype, requires_grad=True)
        kl = losses.kl_penalty(logp, logp.detach() + d, "k3_is", torch.tensor([-70.0], dtype=dtype))
        kl.backward()
        with decimal.localcontext(prec=50):
            ratio, gap = decimal.Decimal(moved).exp(), decimal.Decimal(d)
            value, slope = ratio * (gap.exp() - 1 - gap), -ratio * gap
            largest = ratio * max(gap.exp(), 1 + abs(gap))        # of what is added up
        if moved + d < 60:
            tolerance = 4 * torch.finfo(dtype).eps * float(largest)
            assert abs(kl.item() - float(value)) <= tolerance
            assert abs(logp.grad.item() - float(slope)) <= tolerance


@pytest.mark.parametrize("logp, ref, old, value, slope", [
    (-1.0, -2.0, -26.0, math.exp(24), math.exp(20)),                 # the ratio is held at e^20
    (-1.0, -4.0, -26.0, math.exp(22) + 2 * math.exp(20), math.exp(20)),
    (-100.0, -1.0, -90.0, math.exp(60) - 100 * math.exp(-10), -99 * math.exp(-10)),     # e^89 is held at e^60
    (-400.0, -1.0, -1.0, 1.0, 0.0)])                                 # a ratio of 0
def test_k3_is_at_its_bounds(logp, ref, old, value, slope):
    logps = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    kl = losses.kl_penalty(logps, torch.tensor([ref]).double(), "k3_is", torch.tensor([old]).double())
    kl.backward()
    assert (kl.item(), logps.grad.item()) == pytest.approx((value, slope), rel=1e-12)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_extreme_kl_stays_finite_in_float32(kind):
    logp, ref, old = torch.tensor(list(itertools.product([0.0, -100, -1e4], repeat=3))).T
    logp = logp.clone().requires_grad_()
    kl = losses.kl_penalty(logp, ref, kind, old)
    kl.sum().backward()
    assert kl.dtype == torch.float32 and kl.isfinite().all() and logp.grad.isfinite().all()


def test_kl_estimators_by_enumeration():
    """Over all outcomes of a small distribution: which estimator is unbiased, and whose gradient is whose."""
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    logp, ref = logits.log_softmax(0), torch.randn(6, dtype=torch.float64).log_softmax(0)
    p, old = logp.exp().detach(), torch.randn(6, dtype=torch.float64).log_softmax(0)
    kl, reverse = (logp.exp() * (logp - ref)).sum(), (ref.exp() * (ref - logp)).sum()
    gradient = lambda value: torch.autograd.grad(value, logits, retain_graph=True)[0]
    estimate = {kind: (p * losses.kl_penalty(logp, ref, kind)).sum()  # as sampled from p
                for kind in ("k1", "k2", "k3", "k3+")}
    estimate["k3_is"] = (old.exp() * losses.kl_penalty(logp, ref, "k3_is", old)).sum()      # sampled from old
    for kind in ("k1", "k3", "k3+", "k3_is"):
        assert estimate[kind].item() == pytest.approx(kl.item())
    assert estimate["k2"].item() != pytest.approx(kl.item(), rel=1e-3)
    torch.testing.assert_close(gradient(estimate["k1"]), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(gradient(estimate["k2"]), gradient(kl))
    torch.testing.assert_close(gradient(estimate["k3+"]), gradient(kl))
    torch.testing.assert_close(gradient(estimate["k3_is"]), gradient(kl))
    torch.testing.assert_close(gradient(estimate["k3"]), gradient(reverse))
    # In a reward: the estimate is a number, and the gradient that of the logprob it is multiplied with.
    in_reward = {kind: gradient((p * losses.kl_penalty(logp, ref, kind).detach() * logp).sum())
                 for kind in ("k1", "k2", "k3")}
    torch.testing.assert_close(in_reward["k1"], gradient(kl))
    torch.testing.assert_close(in_reward["k3"], gradient(kl) - gradient(reverse))
    assert not torch.allclose(in_reward["k2"], gradient(kl), rtol=0.1)


@pytest.mark.parametrize("call, message", [
    (lambda: losses.sequence_weights(torch.ones(1), "mean", [0], 1, 1), "'mean'"),
    (lambda: losses.kl_penalty(torch.ones(1), torch.ones(1), "k4"), "'k4'")])
def test_an_unknown_choice_is_an_error(call, message):
    with pytest.raises((KeyError, ValueError), match=message):
        call()


# ---------------------------------------------------------------- PPO

def slow_gae(rewards, values, gamma, lam):
    """The defining sum: A_t = sum over k of (gamma * lam)^k * delta_(t+k), for one sequence."""
    following = values[1:] + [0.0]
    deltas = [r + gamma * following[t] - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def sums(rewards):
    """The score of each sequence, for its rewards."""
    return torch.tensor([sum(own.values()) for own in rewards], dtype=torch.float64)


def test_token_rewards():
    scores, lengths = [1.0, 2.0, -3.0, 0.5, math.nan], [3, 1, 0, 2, 2]     # the third said nothing at all
    kl = torch.randn(8, dtype=torch.float64)
    given = [{length - 1: score} if length else {} for score, length in zip(scores, lengths)]
    got = critic_losses.token_rewards(sums(given), given, kl, 0.3, lengths).tolist()
    expected, c = [], 0
    for score, length in zip(scores, lengths):
        for t in range(length):
            expected.append(-0.3 * kl[c].item() + (score if t == length - 1 else 0.0))
            c += 1
    assert got == pytest.approx(expected, nan_ok=True) and math.isnan(got[-1]) and not math.isnan(got[-2])
    example = critic_losses.token_rewards(torch.tensor([1.0, 3.0]), [{1: 1.0}, {0: 2.0}],
                                          torch.tensor([0.1, 0.2, 0.3]), 1.0, [2, 1])
    assert example.tolist() == pytest.approx([-0.1, 0.8, 2.7])
    given = [{0: 1.0, 2: 3.0}, {}, {1: 5.0}, {0: 1.0}]
    several = critic_losses.token_rewards(sums(given), given, torch.zeros(9), 1.0, [3, 1, 2, 3])
    assert several.tolist() == [1, 0, 3, 0, 0, 5, 1, 0, 0] and several.dtype == torch.float32
    priced = critic_losses.token_rewards(sums(given) - 0.5, given, torch.zeros(9), 1.0, [3, 1, 2, 3])
    assert priced.tolist() == [1, 0, 2.5, -0.5, 0, 4.5, 1, 0, -0.5]


def test_whitening():
    values = (torch.randn(1000) * 3 + 100).tolist() + [math.nan] * 5
    real = values[:-5]
    centre = sum(real) / len(real)
    std = (sum((v - centre) ** 2 for v in real) / len(real)) ** 0.5
    mean = lambda x: torch.as_tensor(x, dtype=torch.float64).nanmean().item()
    got = losses.whiten(torch.tensor(values), mean).tolist()
    assert got == pytest.approx([(v - centre) / std for v in values], abs=1e-5, nan_ok=True)
    assert not losses.whiten(torch.full((1000,), 0.1), mean).any()         # equal ones whiten to exactly 0
    assert losses.whiten(torch.tensor([7.0]), mean).tolist() == [0]
    for middle, size in ((0.0, 1e25), (1e8, 8.0)):                         # squares that float32 cannot hold
        got = losses.whiten(torch.tensor([middle - size, middle, middle + size]), mean)
        assert got.tolist() == pytest.approx([-math.sqrt(1.5), 0, math.sqrt(1.5)])
    small = losses.whiten(torch.tensor([0, 2e-8], dtype=torch.float64), mean)
    assert small.tolist() == pytest.approx([-0.5, 0.5])                    # 1e-8 / (std 1e-8 + 1e-8)


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (1.0, 0.0), (0.9, 0.95), (0.99, 0.5), (0.0, 1.0)])
def test_gae(gamma, lam):
    lengths = [4, 1, 0, 7, 2]
    rewards, values = torch.randn(14, dtype=torch.float64), torch.randn(14, dtype=torch.float64)
    adv, ret = critic_losses.gae(rewards, values, lengths, gamma, lam)
    expected = [a for r, v in zip(rewards.split(lengths), values.split(lengths))
                for a in slow_gae(r.tolist(), v.tolist(), gamma, lam)]
    assert adv.tolist() == pytest.approx(expected)
    assert ret.tolist() == pytest.approx([a + v for a, v in zip(expected, values.tolist())])


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.95), (0.99, 0.0)])
def test_turns_are_paid_at_their_last_token(gamma, lam):
    """As train_ppo.py puts them together, with the KL at each token. The third sequence has no score."""
    turns, kl_coef = [[3, 1, 2], [4], [1, 2], [1, 1, 1]], 0.2
    paid = [[0.5, -1.0, 2.0], [1.0], [math.nan, math.nan], [0.0, 3.0, -2.0]]
    lengths = [sum(lens) for lens in turns]
    kl, values = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    given = [{end - 1: reward for end, reward in zip(itertools.accumulate(lens), own)}
             for lens, own in zip(turns, paid)]
    rewards = critic_losses.token_rewards(sums(given), given, kl, kl_coef, lengths)
    adv, ret = critic_losses.gae(rewards, values, lengths, gamma, lam)
    c, expected = 0, []
    for lens, rewards_of_turns in zip(turns, paid):
        tokens = []
        for length, reward in zip(lens, rewards_of_turns):
            for t in range(length):
                tokens.append(-kl_coef * kl[c].item() + (reward if t == length - 1 else 0.0))
                c += 1
        expected += slow_gae(tokens, values[c - len(tokens):c].tolist(), gamma, lam)
    assert adv.tolist() == pytest.approx(expected, nan_ok=True)
    assert ret.tolist() == pytest.approx([a + v for a, v in zip(expected, values.tolist())], nan_ok=True)
    assert [x.isnan().any().item() for x in adv.split(lengths)] == [False, False, True, False]


@pytest.mark.parametrize("lam", [1.0, 0.9, 0.0])
def test_each_row_of_an_episode_has_a_gae_that_ends_with_what_later_rows_earn(lam):
    """As train_ppo.py puts them together. The second episode has one row, and the last has no score."""
    rows, kl_coef = [[3, 1, 2], [4], [2, 5], [1, 2]], 0.2
    paid = [{5: 2.0}, {3: -1.0}, {0: 0.5, 4: 1.0, 6: 3.0}, {2: math.nan}]
    lengths = [sum(row) for row in rows]
    kl, values = torch.randn(20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    rewards = critic_losses.token_rewards(sums(paid), paid, kl, kl_coef, lengths)
    before = rewards.clone()
    adv, ret = critic_losses.gae(critic_losses.with_later_sequences(rewards, rows), values, sum(rows, []), 1.0, lam)
    expected, c = [], 0
    for row, earned in zip(rows, paid):
        tokens = [earned.get(t, 0.0) - kl_coef * kl[c + t].item() for t in range(sum(row))]
        first = 0
        for length in row:
            own = tokens[first:first + length]
            own[-1] += sum(tokens[first + length:])
            expected += slow_gae(own, values[c + first:c + first + length].tolist(), 1.0, lam)
            first += length
        c += first
    assert adv.tolist() == pytest.approx(expected, nan_ok=True) and torch.equal(rewards[:17], before[:17])
    assert ret.tolist() == pytest.approx([a + v for a, v in zip(expected, values.tolist())], nan_ok=True)
    assert adv[:17].isfinite().all() and adv[17:].isnan().all()
    if lam == 1:                                                # every token's return is what follows it
        assert ret[0].item() == pytest.approx(2 - kl_coef * kl[:6].sum().item())
    example = critic_losses.with_later_sequences(torch.tensor([1.0, 0, 2, 0, 5]), [[2, 1, 1], [1]])
    assert example.tolist() == [1, 2, 2, 0, 5]
    assert torch.equal(critic_losses.with_later_sequences(kl, [[n] for n in lengths]), kl)
    assert critic_losses.with_later_sequences(torch.zeros(0), []).tolist() == []


def test_gae_by_hand():
    rewards, values = torch.tensor([0.0, 0, 1, 2]), torch.tensor([0.0, 0, 0, 0.5])
    adv, ret = critic_losses.gae(rewards, values, [3, 1], 1.0, 0.5)
    assert adv.tolist() == [0.25, 0.5, 1.0, 1.5] and ret.tolist() == [0.25, 0.5, 1.0, 2.0]
    assert critic_losses.gae(rewards[2:], values[2:], [1, 1], 1.0, 0.5)[0].tolist() == [1.0, 1.5]


def test_gae_with_lambda_one_is_return_minus_value_and_perfect_values_leave_nothing():
    rewards, values = torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    adv, ret = critic_losses.gae(rewards, values, [5, 4], 1.0, 1.0)
    to_go = torch.cat([part.flip(0).cumsum(0).flip(0) for part in rewards.split([5, 4])])
    torch.testing.assert_close(ret, to_go)
    torch.testing.assert_close(adv, to_go - values)
    perfect, _ = critic_losses.gae(rewards, to_go, [5, 4], 1.0, 0.3)
    torch.testing.assert_close(perfect, torch.zeros(9, dtype=torch.float64))


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_rank_without_tokens(lengths):
    nothing = torch.empty(0)
    assert [len(x) for x in critic_losses.gae(nothing, nothing, lengths, 1.0, 1.0)] == [0, 0]
    assert len(critic_losses.token_rewards(torch.empty(len(lengths)), [{}] * len(lengths), nothing, 1.0, lengths)) == 0


@pytest.mark.parametrize("value_clip", [0.0, 0.2])
def test_value_loss(value_clip):
    old, ret = torch.randn(300, dtype=torch.float64), torch.randn(300, dtype=torch.float64)
    value = (old + 0.4 * torch.randn(300, dtype=torch.float64)).requires_grad_()
    loss, clipped = critic_losses.value_loss(value, old, ret, value_clip)
    loss.sum().backward()
    for v, o, r, x, g, c in zip(*(t.tolist() for t in (value, old, ret, loss, value.grad, clipped))):
        plain = (v - r) ** 2 / 2
        near = min(max(v, o - value_clip), o + value_clip) if value_clip else v
        worse = (near - r) ** 2 / 2
        assert x == pytest.approx(max(plain, worse)) and c == (worse > plain)
        assert g == pytest.approx(0.0 if worse > plain else v - r)
    assert clipped.any() == bool(value_clip) and clipped.dtype == torch.bool


def test_values_are_clipped_around_the_old_ones():
    """Around the returns, as some do it, the clipped loss would be small and never the larger one."""
    value = torch.tensor([1.0], requires_grad=True)               # went from 0 to 1, with the return at 1.1
    loss, clipped = critic_losses.value_loss(value, torch.tensor([0.0]), torch.tensor([1.1]), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx((0.2 - 1.1) ** 2 / 2) and clipped.item() and value.grad.item() == 0


@pytest.mark.skipif(not hasattr(losses, "adapted_kl_coef"), reason="a recipe adds it")
@pytest.mark.parametrize("kl, expected", [(6.0, 0.1), (6.6, 0.105), (60.0, 0.11), (5.4, 0.095), (0.0, 0.09)])
def test_adapted_kl_coef(kl, expected):
    assert losses.adapted_kl_coef(0.1, kl, 6.0, 512, 256) == pytest.approx(expected)


def test_what_rounds_is_not_clipped():
    """In float32 old + (value - old) is often not value."""
    old, value, ret = torch.randn(10_000), torch.randn(10_000), torch.randn(10_000)
    _, clipped = critic_losses.value_loss(value, old, ret, 100.0)
    assert not clipped.any() and (old + (value - old) != value).any()


def test_where_clipping_acted():
    low, high = torch.tensor([True, False, False]), torch.tensor([False, True, False])
    logged = {name: mask.tolist() for name, mask in losses.clip_ratios(low, high).items()}
    assert logged == {"clip_ratio/low_mean": [True, False, False], "clip_ratio/high_mean": [False, True, False],
                      "clip_ratio/region_mean": [True, True, False]}
