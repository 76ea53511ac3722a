"""
Generated problems of the tasks compose, guess and arithmetic. Runs of other tasks do not open this file.

GENERATORS has a function for each --task. It draws a problem from a random generator, as a pair of a text and
columns: see tasks/generate_problems.py.
"""

# ------------------------------------------------------------------------------------------------------------
# compose. The prompt, such as 5274 afc, names operations on four digits, which are carried out in this order.
# The answers that tiny/compose has read use another order, so it knows the steps and has to find the plan.

# These operations move digits. Each has the places, from 0 to 3, that its four digits come from.
MOVES = {
    "a": "3120",                # swaps the outer two
    "b": "1023",                # swaps the first two
    "c": "0213",                # swaps the middle two
    "d": "0132",                # swaps the last two
    "e": "1230",                # rotates to the left
    "f": "2301"}                # swaps the halves
# These operations add a digit to another. Each has the place of the sum, and the place of what is added.
SUMS = {"g": (0, 3), "h": (1, 2), "i": (2, 0), "j": (3, 1)}
OPERATIONS = [*MOVES, *SUMS]


def operate(name, digits):
    """Return the four digits after an operation."""
    if name in MOVES:
        return "".join(digits[int(place)] for place in MOVES[name])
    place, other = SUMS[name]
    total = int(digits[place]) + int(digits[other])
    if total > 9:
        total -= 9                                              # 9 + 1 is 1, so that no digit is 0
    return f"{digits[:place]}{total}{digits[place + 1:]}"


def carried_out(digits, order):
    """Return the lines of a solution: each operation with the digits after it, and the last digits again."""
    lines = []
    for name in order:
        digits = operate(name, digits)
        lines.append(name + digits)
    return "\n".join([*lines, f"####{digits}"])


def chain(rng, depth):
    """Return the text of a random prompt, its digits, and the order of its operations."""
    digits = "".join(rng.sample("123456789", 4))
    order = rng.sample(OPERATIONS, depth)
    return f"{digits} {''.join(order)}", digits, order


def compose_problem(rng, difficulty):
    deepest = min(4 + difficulty, len(OPERATIONS))
    depth = rng.randint(2, deepest)
    text, digits, order = chain(rng, depth)
    solution = carried_out(digits, order)
    answer = solution.rpartition("#")[2]
    columns = {"answer": answer, "source": f"depth {depth}", "solution": solution}
    # Problems of the greatest depth are never trained on: they show whether the plan works for longer chains.
    if depth == deepest:
        columns["only"] = "eval"
    return text, columns


# ------------------------------------------------------------------------------------------------------------
# problems for the environments in environments/


def guess_problem(rng, difficulty):
    number = rng.randint(1, 64)
    sentences = ["I have a number.", "It is from 1 to 64.", "You have 6 guesses.", "I say higher or lower."]
    text = " ".join(rng.sample(sentences, 4))
    return text, {"number": number, "source": "guess", "hidden": f"number {number}"}


def arithmetic_problem(rng, difficulty):
    a, b, c = (rng.randint(11, 10 ** (difficulty + 1) - 1) for _ in range(3))
    op, value = rng.choice([("+", a * b + c), ("-", a * b - c)])
    return f"What is {a}*{b}{op}{c}?", {"answer": str(value), "source": "arithmetic"}


GENERATORS = {"compose": compose_problem, "guess": guess_problem, "arithmetic": arithmetic_problem}
