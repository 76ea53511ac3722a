"""
Generated problems: those of algebra, and generated_rows, which draws the rows of a split for each generated
--task. tasks/more_problems.py has the problems of the other tasks, which alone open it.

A problem is a text and columns: `answer` for the verifier, `source` for the evaluation of each kind, and
`solution`, worked in steps, which tiny/pretrain.py and train_sft.py learn. If a problem has something
`hidden`, neither this nor the text may be in both splits. A problem with `only` is used in the split that it
names.
"""
import itertools
import math
import random
import zlib
from fractions import Fraction

from configurator import InputError

# ------------------------------------------------------------------------------------------------------------
# algebra. A template draws (problem, steps of the worked solution, answer). At difficulty 1 the numbers are
# small and each step is one small operation on the text before it, so that a model of a million parameters
# learns it in minutes. Difficulty d scales the numbers and brings signs, coefficients, layers and fractions.


def term(k, name=""):
    """Return a signed term of a sum: +2x, -x, +3, and nothing for 0."""
    if k == 0:
        return ""
    sign = "-" if k < 0 else "+"
    if name and abs(k) == 1:
        return sign + name
    return f"{sign}{abs(k)}{name}"


def polynomial(coefficients, name="x"):
    """Return the text of a polynomial, the highest power first: [1, -5, 6] is x^2-5x+6. It has two or more
    coefficients."""
    powers = ["", name]
    powers += [f"{name}^{n}" for n in range(2, len(coefficients))]
    return "".join(map(term, coefficients, reversed(powers))).removeprefix("+")


def nonzero(rng, low, high):
    """Return a random whole number from low to high, but not 0."""
    return rng.choice([value for value in range(low, high + 1) if value])


def scaled(rng, n, d):
    """Return a random whole number, but not 0. At difficulty 1 it is from 1 to n, and therefore positive."""
    return nonzero(rng, n * (1 - d), n * d)


def absolute_value(rng, d):
    k = rng.randint(1, d)
    m = rng.randint(1, d)
    a = nonzero(rng, -9 * d, 4 * d)
    size = rng.randint(1, 9 * d)
    c = rng.randint(1, 9 * d)
    inside = polynomial([m, a])
    left = polynomial([k, c], f"|{inside}|")
    steps = [f"|{inside}|={size}", f"{polynomial([m, 0])}={size}{term(-a)}"]
    return f"Larger solution of {left}={k * size + c}", steps, Fraction(size - a, m)


def arithmetic_sequence(rng, d):
    first = scaled(rng, 9, d)
    n = rng.randint(4, 10 * d)
    gap = Fraction(scaled(rng, 9, d), rng.randint(1, d))
    rise = (n - 1) * gap
    steps = [f"d={gap}", f"{n - 1}*{gap}={rise}", f"{first}{term(rise)}"]
    return f"Term {n} of {first}, {first + gap}, {first + 2 * gap}, ...", steps, first + rise


def exponents(rng, d):
    pairs = itertools.product(range(2, 11), range(1, 9))
    base, power = rng.choice([(b, p) for b, p in pairs if b ** p <= 1000 * d])
    factors = []
    k = 0
    c = 0
    for i in range(1, d + 1):
        m = rng.randint(1, d)
        a = nonzero(rng, -9 * d, 4 * d)
        factors.append(f"{base ** i}^({polynomial([m, a])})")
        k += i * m
        c += i * a
    steps = [f"{base}^({polynomial([k, c])})={base}^{power}", f"{polynomial([k, 0])}={power}{term(-c)}"]
    return f"Solve {'*'.join(factors)}={base ** power}", steps, Fraction(power - c, k)


def fractions(rng, d):
    bottoms = [rng.randint(2, 5 + 2 * d) for _ in range(d + 1)]
    value, *others = [Fraction(rng.randint(1, bottom - 1), bottom) for bottom in bottoms]
    text = str(value)
    steps = []
    for other in others:
        if steps:
            text = f"({text})"
        # A larger number is never subtracted, so that no value is negative.
        op = rng.choice("+*" if other > value else "+*-")
        text += f"{op}{other}"
        bottom = value.denominator * other.denominator
        if op != "*":
            bottom = math.lcm(value.denominator, other.denominator)
            steps.append(f"{value * bottom}/{bottom}{op}{other * bottom}/{bottom}")
        value = {"+": value + other, "-": value - other, "*": value * other}[op]
        steps.append(f"{value * bottom}/{bottom}")
    return f"Compute {text}", steps, value


def nested_linear(rng, d):
    x = rng.randint(0, 6 * d)
    shift = nonzero(rng, -5 * d, 5 * d)
    text = f"x{term(shift)}"
    value = x + shift
    states = [f"x={value}{term(-shift)}"]
    for layer in range(d):
        factor = rng.randint(2, 2 + d)
        shift = nonzero(rng, -5 * d, 5 * d)
        states.append(f"{factor}({text})={factor * value}")
        text = f"{factor}({text}){term(shift)}"
        value = factor * value + shift
        states.append(f"{text}={value}")
    factor = rng.randint(2, 2 + d)
    return f"Solve {factor}({text})={factor * value}", states[::-1], x


def polynomial_remainder(rng, d):
    x = scaled(rng, 5, d)
    value = rng.randint(1, d)
    last = nonzero(rng, -9 * d, 9 * d)
    coefficients = [value, *(scaled(rng, 9, d) for _ in range(d)), last]
    steps = [f"x={x}"]
    # This is Horner's rule.
    for k in coefficients[1:]:
        steps += [f"{value}*{x}{term(k)}", f"{value * x}{term(k)}"]
        value = value * x + k
    return f"Remainder of ({polynomial(coefficients)})/({polynomial([1, -x])})", steps, value


def quadratics(rng, d):
    m = rng.randint(1, d)
    p = scaled(rng, 6, d)
    c = rng.randint(0, 9 * d)
    # The roots are p/m < q/m.
    q = p + m * rng.randint(1, 7 * d)
    a = m * m
    b = -m * (p + q)
    steps = [f"{polynomial([a, b, p * q])}=0", f"({polynomial([m, -p])})({polynomial([m, -q])})=0"]
    return f"Larger root of {polynomial([a, b, p * q + c])}={c}", steps, Fraction(q, m)


def systems(rng, d):
    x = scaled(rng, 9, d)
    y = scaled(rng, 9, d)
    a = rng.randint(1, 2 * d)
    b = rng.randint(1, 2 * d)
    k = rng.randint(1, d)
    m = rng.randint(1, d)
    wanted = rng.choice("xy")
    # The equations are ax + ky = first and bx - mky = second.
    first = a * x + k * y
    second = b * x - m * k * y
    total = polynomial([m * a + b, 0])
    steps = [f"{total}={m * first}{term(second)}", f"{total}={m * first + second}"]
    answer = x
    if wanted == "y":
        steps += [f"x={x}", f"{polynomial([k, 0], 'y')}={first}{term(-a * x)}"]
        answer = y
    equations = (f"{polynomial([a, 0])}{term(k, 'y')}={first}, "
                 f"{polynomial([b, 0])}{term(-m * k, 'y')}={second}")
    return f"{equations}. Find {wanted}", steps, answer


TEMPLATES = (absolute_value, arithmetic_sequence, exponents, fractions, nested_linear, polynomial_remainder,
             quadratics, systems)


def algebra_problem(rng, difficulty):
    template = rng.choice(TEMPLATES)
    text, steps, answer = template(rng, difficulty)
    solution = "\n".join([*steps, f"Answer: {answer}"])
    return text, {"answer": str(answer), "source": template.__name__, "solution": solution}


# ------------------------------------------------------------------------------------------------------------
# the rows of a split


def held_out(text):
    # Returns whether a prompt is in the split "eval". A hash of its text decides about that, so that no two
    # seeds can mix training and evaluation, and rows with the same prompt are always in the same split.
    return zlib.crc32(text.encode()) % 8 == 0


def generated_rows(task, split, count, seed=0, difficulty=1):
    """Return `count` distinct problems of a split, "train" or "eval", as pairs (text, row).

    With count 0 there are 4,096 for "train" and 128 for "eval", or all that the task has if it has fewer.
    Raises InputError for an unknown task, and if there are too few distinct problems.
    """
    generate = algebra_problem
    if task == "squares":
        from tasks.squares import squares_problem as generate
    elif task != "algebra":
        from tasks.more_problems import GENERATORS
        if task not in GENERATORS:
            raise InputError(f"task must be algebra, squares, {', '.join(GENERATORS)}, gsm8k, "
                             f"reasoning_gym:... or file, not {task!r}")
        generate = GENERATORS[task]
    wanted = count or {"train": 4096, "eval": 128}[split]
    rng = random.Random(f"{task} {split} {seed} {difficulty}")
    rows = {}
    misses = 0
    while len(rows) < wanted and misses < 20_000:
        text, columns = generate(rng, difficulty)
        parts = [columns.pop("name", text)]
        if "hidden" in columns:
            parts.append(columns["hidden"])
        name = ", ".join(parts)
        sides = {held_out(part) for part in parts}
        only = columns.pop("only", split)
        misses += 1
        if name not in rows and only == split and sides == {split == "eval"}:
            rows[name] = {"prompt": [{"role": "user", "content": text}], **columns}
            misses = 0
    if not rows or len(rows) < count:
        raise InputError(f"task {task} at difficulty {difficulty} has only {len(rows)} distinct {split} "
                         f"problems, not {count}: lower {split}_prompts or raise the difficulty, as in "
                         f"--task={task}:2")
    return list(rows.items())
