"""Every generated problem is solved again by other means."""
import itertools
import math
import random
import re
from collections import Counter
from fractions import Fraction

import pytest

from runs import load_rows
import rewards
from tasks import generate_problems
from tiny import pretrain


# ------------------------------------------------------------------------------------------------ algebra


def function_of(text, names="x"):
    """A Python function of the variables in a problem's notation: 2|3x-5|, 4(x+1), x^2."""
    text = re.sub(r"\|(.*)\|", r"abs(\1)", text)
    text = re.sub(r"([\d)])(?=[a-z(])", r"\1*", text).replace("^", "**")
    text = re.sub(r"\d+", lambda number: f"F({number[0]})", text)
    return eval(f"lambda {', '.join(names)}: {text}", {"F": Fraction})


def solve_absolute_value(text):
    left, right = text.removeprefix("Larger solution of ").split("=")
    # The function is convex and a line on its far right, where the larger solution lies.
    f, far = function_of(left), Fraction(10 ** 6)
    x = far - (f(far) - int(right)) / (f(far + 1) - f(far))
    assert f(x) == int(right) and f(x + 1) > f(x)
    return x


def solve_arithmetic_sequence(text):
    n, terms = re.fullmatch(r"Term (\d+) of (.*), \.\.\.", text).groups()
    terms = [Fraction(t) for t in terms.split(", ")]
    assert terms[2] - terms[1] == terms[1] - terms[0]
    while len(terms) < int(n):
        terms.append(terms[-1] + terms[1] - terms[0])
    return terms[-1]


def solve_exponents(text):
    left, right = text.removeprefix("Solve ").split("=")

    def log_left(x):
        factors = re.findall(r"(\d+)\^\((.*?)\)", left)
        assert left == "*".join(f"{base}^({exponent})" for base, exponent in factors)
        return sum(float(function_of(exponent)(x)) * math.log(int(base)) for base, exponent in factors)
    x = (math.log(int(right)) - log_left(0)) / (log_left(1) - log_left(0))
    return Fraction(x).limit_denominator(100)


def solve_fractions(text):
    return function_of(text.removeprefix("Compute "), "")()


def solve_nested_linear(text):
    left, right = text.removeprefix("Solve ").split("=")
    f = function_of(left)
    return (int(right) - f(0)) / (f(1) - f(0))


def solve_polynomial_remainder(text):
    polynomial, root = re.fullmatch(r"Remainder of \((.*)\)/\(x([+-]\d+)\)", text).groups()
    remainder = {int(power or bool(x)): int(sign + (k or "1")) for sign, k, x, power in
                 re.findall(r"([+-]?)(\d*)(x?)\^?((?<=\^)\d+)?(?=[+-]|$)", polynomial) if k or x}
    # Long division: subtract lead * x^(degree-1) * divisor until a constant is left.
    while (degree := max(remainder)) > 0:
        lead = remainder.pop(degree)
        remainder[degree - 1] = remainder.get(degree - 1, 0) - lead * int(root)
    return remainder[0]


def solve_quadratics(text):
    left, right = text.removeprefix("Larger root of ").split("=")
    f = function_of(left)
    a, b, c = (f(1) + f(-1)) / 2 - f(0), (f(1) - f(-1)) / 2, f(0) - int(right)
    discriminant = b * b - 4 * a * c
    assert discriminant > 0 and math.isqrt(int(discriminant)) ** 2 == discriminant
    return max((-b + sign * math.isqrt(int(discriminant))) / (2 * a) for sign in (1, -1))


def solve_systems(text, wanted=""):
    first, second, wanted = re.fullmatch(r"(.*), (.*)\. Find ([xy])", text).groups()
    rows = []
    for equation in (first, second):
        left, right = equation.split("=")
        f = function_of(left, "xy")
        rows.append((f(1, 0), f(0, 1), int(right)))
    (a, b, e), (c, d, f) = rows
    # Cramer's rule
    return {"x": (e * d - b * f), "y": (a * f - e * c)}[wanted] / (a * d - b * c)


def text_of(row):
    return row["prompt"][0]["content"]


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def drawn(request):
    return request.param, load_rows("algebra", "train", 1600, seed=3, difficulty=request.param)


def test_every_answer_is_right(drawn):
    for row in drawn[1]:
        assert Fraction(row["answer"]) == globals()[f"solve_{row['source']}"](text_of(row)), row


def test_every_step_holds(drawn):
    """A step is an equation that holds at the solution, or an expression; the last of those is the answer."""
    for row in drawn[1]:
        *steps, last = row["solution"].split("\n")
        assert last == f"Answer: {row['answer']}"
        answer, text = Fraction(row["answer"]), text_of(row)
        known = {"x": answer, "y": 0, "d": 0}
        if row["source"] == "arithmetic_sequence":
            known["d"] = (lambda a, b: b - a)(*map(Fraction, re.findall(r"(?<= )-?[\d/]+(?=,)", text)[:2]))
        if row["source"] == "polynomial_remainder":
            known["x"] = -int(re.search(r"x([+-]\d+)\)$", text)[1])
        if row["source"] == "systems":
            known |= {name: solve_systems(text[:-1] + name) for name in "xy"}
        value = None
        for step in steps:
            sides = [function_of(side, "xyd")(**known) for side in step.split("=")]
            assert len(sides) == 1 or math.isclose(*sides, abs_tol=1e-9), (step, row)
            value = sides[0] if len(sides) == 1 else value
        assert value in (None, answer), row


def test_problems_are_distinct_and_of_every_template(drawn):
    difficulty, rows = drawn
    assert len({text_of(row) for row in rows}) == len(rows) == 1600
    for template in generate_problems.TEMPLATES:
        assert sum(row["source"] == template.__name__ for row in rows) > 100
    if difficulty == 1:
        assert max(len(text_of(row)) for row in rows) <= 30
        assert max(len(row["solution"]) for row in rows) <= 40
        assert sum(Fraction(row["answer"]) < 0 for row in rows) < 0.05 * len(rows)
    assert min(Fraction(row["answer"]) for row in rows if row["source"] == "fractions") >= 0


def test_difficulty_enlarges_numbers():
    sizes = []
    for difficulty in (1, 2, 3, 4):
        rows = load_rows("algebra", "train", 800, difficulty=difficulty)
        sizes.append(sum(max(map(int, re.findall(r"\d+", text_of(row)))) for row in rows))
    assert sizes == sorted(sizes) and sizes[2] > 3 * sizes[0]


@pytest.mark.parametrize("template", generate_problems.TEMPLATES, ids=lambda template: template.__name__)
def test_templates_have_many_problems(template):
    rng = random.Random(0)
    texts = {template(rng, 1)[0] for _ in range(8000)}
    assert len(texts) >= 400
    assert sum(map(generate_problems.held_out, texts)) >= 40


@pytest.mark.parametrize("k, name, text", [(2, "x", "+2x"), (-1, "x", "-x"), (1, "", "+1"), (-3, "", "-3"),
                                           (0, "x", ""), (11, "x", "+11x")])
def test_term(k, name, text):
    assert generate_problems.term(k, name) == text


# ------------------------------------------------------------------------------------------------ compose

# What the operations do, in other words: the new order of the digits w x y z, or which place is added to which.
MOVES = {"a": lambda w, x, y, z: [z, x, y, w], "b": lambda w, x, y, z: [x, w, y, z],
         "c": lambda w, x, y, z: [w, y, x, z], "d": lambda w, x, y, z: [w, x, z, y],
         "e": lambda w, x, y, z: [x, y, z, w], "f": lambda w, x, y, z: [y, z, w, x]}
SUMS = {"g": "z to w", "h": "y to x", "i": "w to y", "j": "x to z"}


def composed(digits, order):
    """The states of four digits, as numbers, after each operation."""
    state = [int(digit) for digit in digits]
    for name in order:
        if name in MOVES:
            state = MOVES[name](*state)
        else:
            added, to = ("wxyz".index(digit) for digit in SUMS[name].split(" to "))
            state = [*state]
            for _ in range(state[added]):                       # counted one by one, from 9 on to 1
                state[to] = 1 if state[to] == 9 else state[to] + 1
        yield "".join(map(str, state))


@pytest.mark.parametrize("split, depths", [("train", {2, 3, 4}), ("eval", {2, 3, 4, 5})])
def test_every_chain_is_carried_out(split, depths):
    rows = load_rows("compose", split, 1200, seed=3)
    for row in rows:
        digits, order = text_of(row).split()
        states = list(composed(digits, order))
        assert row["solution"].split("\n") == [
            *(name + state for name, state in zip(order, states)), f"####{states[-1]}"]
        assert row["answer"] == states[-1] and row["source"] == f"depth {len(order)}" and "only" not in row
        assert rewards.exact_accuracy(None, [row["solution"]], [row["answer"]]) == [1.0]
        assert generate_problems.held_out(text_of(row)) == (split == "eval")
    counts = Counter(row["source"] for row in rows)
    assert counts.keys() == {f"depth {depth}" for depth in depths}
    assert min(counts.values()) > 0.8 * 1200 / len(depths)


def test_difficulty_lengthens_chains():
    for difficulty, deepest in ((1, 5), (2, 6), (6, 10), (100, 10)):
        for split, longest in (("train", deepest - 1), ("eval", deepest)):
            rows = load_rows("compose", split, 200, difficulty=difficulty)
            assert max(len(text_of(row).split()[1]) for row in rows) == longest


def test_what_the_base_of_compose_has_read():
    """Steps that are right, in an order that is mostly not the prompt's, and no prompt that is held out."""
    planned, depths = 0, Counter()
    for _, (user, assistant) in itertools.islice(pretrain.compose(random.Random(0)), 3000):
        digits, order = user["content"].split()
        *lines, last = assistant["content"].split("\n")
        taken = "".join(line[0] for line in lines)
        states = list(composed(digits, taken))
        assert [line[1:] for line in lines] == states and last == f"####{states[-1]}"
        assert set(taken) <= set(order) and len(set(taken)) == len(taken) > 0
        assert not generate_problems.held_out(user["content"])
        depths[len(order)] += 1
        planned += len(order) == 4 and taken == order
    assert set(depths) == set(range(1, 9)) and depths[1] > 4 * depths[4] / 2
    # One of four lengths and of 24 orders.
    assert planned < 0.05 * depths[4]
