"""
Generated problems. GENERATORS has a function for each --task, which draws one from a random generator, and
generated_rows draws the rows of a split.

A problem is a text and columns: `answer` for the verifier, `source` for the evaluation of each kind, and
`solution`, worked in steps, which only tiny/pretrain.py reads. If a problem has something `hidden`, neither
this nor the text may be in both splits. A problem with `only` is used in the split that it names.
"""
import math
import random
import zlib
from fractions import Fraction

# ------------------------------------------------------------------------------------------------------------
# algebra. A template draws (problem, steps of the worked solution, answer). At difficulty 1 the numbers are
# small and each step is one small operation on the text before it, so that a model of a million parameters
# learns it in minutes. Difficulty d scales the numbers and brings signs, coefficients, layers and fractions.


def term(k, name=""):
    """Return a signed term of a sum: +2x, -x, +3, and nothing for 0."""
    digits = "" if name and abs(k) == 1 else abs(k)
    return f"{'-' if k < 0 else '+'}{digits}{name}" if k else ""


def polynomial(coefficients, name="x"):
    """Return the text of a polynomial, the highest power first: [1, -5, 6] is x^2-5x+6."""
    powers = range(len(coefficients) - 1, -1, -1)
    names = [f"{name}^{power}" if power > 1 else name * power for power in powers]
    return "".join(map(term, coefficients, names)).removeprefix("+")


def nonzero(rng, low, high):
    """Draws a whole number from low to high, never 0; low = n * (1 - d) keeps it positive at difficulty 1."""
    return rng.choice([value for value in range(low, high + 1) if value])


def absolute_value(rng, d):
    k, m, a = rng.randint(1, d), rng.randint(1, d), nonzero(rng, -9 * d, 4 * d)
    size, c = rng.randint(1, 9 * d), rng.randint(1, 9 * d)
    inside = polynomial([m, a])
    left = polynomial([k, c], f"|{inside}|")
    steps = [f"|{inside}|={size}", f"{polynomial([m, 0])}={size}{term(-a)}"]
    return f"Larger solution of {left}={k * size + c}", steps, Fraction(size - a, m)


def arithmetic_sequence(rng, d):
    first, n = nonzero(rng, 9 * (1 - d), 9 * d), rng.randint(4, 10 * d)
    gap = Fraction(nonzero(rng, 9 * (1 - d), 9 * d), rng.randint(1, d))
    rise = (n - 1) * gap
    steps = [f"d={gap}", f"{n - 1}*{gap}={rise}", f"{first}{term(rise)}"]
    return f"Term {n} of {first}, {first + gap}, {first + 2 * gap}, ...", steps, first + rise


def exponents(rng, d):
    base, power = rng.choice([(b, p) for b in range(2, 11) for p in range(1, 9) if b ** p <= 1000 * d])
    factors = [(i, rng.randint(1, d), nonzero(rng, -9 * d, 4 * d)) for i in range(1, d + 1)]
    k, c = sum(i * m for i, m, a in factors), sum(i * a for i, m, a in factors)
    left = "*".join(f"{base ** i}^({polynomial([m, a])})" for i, m, a in factors)
    steps = [f"{base}^({polynomial([k, c])})={base}^{power}", f"{polynomial([k, 0])}={power}{term(-c)}"]
    return f"Solve {left}={base ** power}", steps, Fraction(power - c, k)


def fractions(rng, d):
    bottoms = [rng.randint(2, 5 + 2 * d) for _ in range(d + 1)]
    value, *others = [Fraction(rng.randint(1, bottom - 1), bottom) for bottom in bottoms]
    text, steps = str(value), []
    for other in others:
        # A larger number is never subtracted, so that no value is negative.
        op = rng.choice("+*" if other > value else "+*-")
        text = f"({text}){op}{other}" if steps else f"{text}{op}{other}"
        top, bottom = value.numerator * other.numerator, value.denominator * other.denominator
        if op != "*":
            bottom = math.lcm(value.denominator, other.denominator)
            a, b = int(value * bottom), int(other * bottom)
            steps.append(f"{a}/{bottom}{op}{b}/{bottom}")
            top = a + b if op == "+" else a - b
        steps.append(f"{top}/{bottom}")
        value = Fraction(top, bottom)
    return f"Compute {text}", steps, value


def nested_linear(rng, d):
    x, shift = rng.randint(0, 6 * d), nonzero(rng, -5 * d, 5 * d)
    text, value = f"x{term(shift)}", x + shift
    states = [f"x={value}{term(-shift)}"]
    for layer in range(d):
        factor, shift = rng.randint(2, 2 + d), nonzero(rng, -5 * d, 5 * d)
        states.append(f"{factor}({text})={factor * value}")
        text, value = f"{factor}({text}){term(shift)}", factor * value + shift
        states.append(f"{text}={value}")
    factor = rng.randint(2, 2 + d)
    return f"Solve {factor}({text})={factor * value}", states[::-1], x


def polynomial_remainder(rng, d):
    x, lead, last = nonzero(rng, 5 * (1 - d), 5 * d), rng.randint(1, d), nonzero(rng, -9 * d, 9 * d)
    coefficients = [lead, *(nonzero(rng, 9 * (1 - d), 9 * d) for power in range(d)), last]
    value, steps = lead, [f"x={x}"]
    # Horner's rule
    for k in coefficients[1:]:
        steps += [f"{value}*{x}{term(k)}", f"{value * x}{term(k)}"]
        value = value * x + k
    return f"Remainder of ({polynomial(coefficients)})/({polynomial([1, -x])})", steps, value


def quadratics(rng, d):
    m, p, c = rng.randint(1, d), nonzero(rng, 6 * (1 - d), 6 * d), rng.randint(0, 9 * d)
    # The roots are p/m < q/m.
    q = p + m * rng.randint(1, 7 * d)
    a, b = m * m, -m * (p + q)
    steps = [f"{polynomial([a, b, p * q])}=0", f"({polynomial([m, -p])})({polynomial([m, -q])})=0"]
    return f"Larger root of {polynomial([a, b, p * q + c])}={c}", steps, Fraction(q, m)


def systems(rng, d):
    x, y = (nonzero(rng, 9 * (1 - d), 9 * d) for name in "xy")
    a, b, k, m = rng.randint(1, 2 * d), rng.randint(1, 2 * d), rng.randint(1, d), rng.randint(1, d)
    first, second, wanted = a * x + k * y, b * x - m * k * y, rng.choice("xy")
    ax, bx, total = (term(coefficient, "x")[1:] for coefficient in (a, b, m * a + b))
    steps = [f"{total}={m * first}{term(second)}", f"{total}={m * first + second}"]
    if wanted == "y":
        steps += [f"x={x}", f"{term(k, 'y')[1:]}={first}{term(-a * x)}"]
    text = f"{ax}{term(k, 'y')}={first}, {bx}{term(-m * k, 'y')}={second}. Find {wanted}"
    return text, steps, x if wanted == "x" else y


TEMPLATES = (absolute_value, arithmetic_sequence, exponents, fractions, nested_linear, polynomial_remainder,
             quadratics, systems)


def algebra_problem(rng, difficulty):
    template = rng.choice(TEMPLATES)
    text, steps, answer = template(rng, difficulty)
    solution = "\n".join([*steps, f"Answer: {answer}"])
    return text, {"answer": str(answer), "source": template.__name__, "solution": solution}


# ------------------------------------------------------------------------------------------------------------
# compose. The prompt, such as 5274 afc, names operations on four digits, which are carried out in this order.
# The answers that tiny/compose has read use another order, so it knows the steps and has to find the plan.


def plus(digit, by):
    return str((int(digit) + int(by) - 1) % 9 + 1)              # from 1 to 9, so that 9 + 1 is 1


OPERATIONS = {
    "a": lambda s: s[3] + s[1:3] + s[0],                        # swap the outer two
    "b": lambda s: s[1] + s[0] + s[2:],                         # swap the first two
    "c": lambda s: s[0] + s[2] + s[1] + s[3],                   # swap the middle two
    "d": lambda s: s[:2] + s[3] + s[2],                         # swap the last two
    "e": lambda s: s[1:] + s[0],                                # rotate to the left
    "f": lambda s: s[2:] + s[:2],                               # swap the halves
    "g": lambda s: plus(s[0], s[3]) + s[1:],                    # add the last to the first
    "h": lambda s: s[0] + plus(s[1], s[2]) + s[2:],             # add the third to the second
    "i": lambda s: s[:2] + plus(s[2], s[0]) + s[3],             # add the first to the third
    "j": lambda s: s[:3] + plus(s[3], s[1])}                    # add the second to the last


def carried_out(digits, order):
    lines = [f"{name}{(digits := OPERATIONS[name](digits))}" for name in order]
    return "\n".join([*lines, f"####{digits}"])


def chain(rng, depth):
    return "".join(rng.sample("123456789", 4)), rng.sample(sorted(OPERATIONS), depth)


def compose_problem(rng, difficulty):
    # Problems of the greatest depth are never trained on: they show whether the plan works for longer chains.
    deepest = min(4 + difficulty, len(OPERATIONS))
    depth = rng.randint(2, deepest)
    digits, order = chain(rng, depth)
    solution = carried_out(digits, order)
    return f"{digits} {''.join(order)}", {
        "answer": solution[-4:], "source": f"depth {depth}", "solution": solution,
        **({"only": "eval"} if depth == deepest else {})}


# ------------------------------------------------------------------------------------------------------------
# problems for the environments in environments/


def guess_problem(rng, difficulty):
    sentences = ["I have a number.", "It is from 1 to 64.", "You have 6 guesses.", "I say higher or lower."]
    number, text = rng.randint(1, 64), " ".join(rng.sample(sentences, 4))
    return text, {"number": number, "source": "guess", "hidden": f"number {number}"}


def arithmetic_problem(rng, difficulty):
    a, b, c = (rng.randint(11, 10 ** (difficulty + 1) - 1) for _ in range(3))
    op, value = rng.choice([("+", a * b + c), ("-", a * b - c)])
    return f"What is {a}*{b}{op}{c}?", {"answer": str(value), "source": "arithmetic"}


GENERATORS = {"algebra": algebra_problem, "compose": compose_problem, "guess": guess_problem,
              "arithmetic": arithmetic_problem}


def held_out(text):
    # A hash of the prompt's text decides about its split, so that no two seeds can mix training and
    # evaluation, and rows with the same prompt are always in the same split.
    return zlib.crc32(text.encode()) % 8 == 0


def generated_rows(task, split, count, seed=0, difficulty=1):
    """Return `count` distinct problems of a split, "train" or "eval", as pairs (text, row).

    With count 0 there are 4,096 for "train" and 128 for "eval", or all that the task has if it has fewer.
    Raises ValueError for an unknown task, and if there are too few distinct problems.
    """
    if task not in GENERATORS:
        raise ValueError(f"task must be {', '.join(GENERATORS)}, gsm8k, reasoning_gym:... or file, not "
                         f"{task!r}")
    wanted = count or {"train": 4096, "eval": 128}[split]
    rng, rows, misses = random.Random(f"{task} {split} {seed} {difficulty}"), {}, 0
    while len(rows) < wanted and misses < 20_000:
        text, columns = GENERATORS[task](rng, difficulty)
        parts = [text, columns["hidden"]] if "hidden" in columns else [text]
        name, misses = ", ".join(parts), misses + 1
        sides = {columns.pop("only", split), *("eval" if held_out(part) else "train" for part in parts)}
        if name not in rows and sides == {split}:
            rows[name], misses = {"prompt": [{"role": "user", "content": text}], **columns}, 0
    if not rows or len(rows) < count:
        raise ValueError(f"task {task} at difficulty {difficulty} has only {len(rows)} distinct {split} "
                         f"problems, not {count}: lower {split}_prompts or raise the difficulty, as in "
                         f"--task={task}:2")
    return list(rows.items())
