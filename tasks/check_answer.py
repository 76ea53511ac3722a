r"""Answers: which final answer a completion gives, and whether it is the right one.

    extract_answer  finds the final answer in a text: a \boxed{}, or what follows `Answer:` or ####
    comparison      says whether two answers are the same, as exact values or as text
    check_answer    says whether a completion's final answer is the right one
"""
import contextlib
import logging
import operator
import re
from fractions import Fraction

# ------------------------------------------------------------------------------------------------------------
# extraction

# Where an answer begins. It may follow a line that only says `Final Answer`, or GSM8K's ####, unless the ####
# is a heading with text below it.
MARKS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\boxed\s+(?P<token>[^\s{}$]+)|\\.|[{}]|(?P<end></answer>)|"
                   r"(?P<mark>answer\**\s*[:：]|<answer>|"
                   r"^[#* \t]{0,9}(?:final[ \t]{1,9})?answer[* \t\r]{0,9}$|"
                   r"(?<!#)####(?!#)(?![ \t]*\**(?-i:[A-Z])[^\n]{0,80}\n\s{0,9}\S))|"
                   r"(?P<words>final\s+answer\s+is\b\s*[:：]?)", re.I | re.M)
# If only this stands between two boxes, they are one answer.
JOINT = re.compile(r"\}[\s$]*(?:,|,?\s*and\b)[\s$]*\\(?:boxed|fbox)\s*\{", re.I)
# This may stand around an answer in its line, and is removed.
FRAME = re.compile(r"^.*\banswer\s+is\b:?|[ ,]\(?(?:since|because)\b.*|\.\s+I\s+hope\b.*|"
                   r"</(?:s|think)>.*|<\|\w{1,30}\|>.*", re.I)
EDGES = " \t\r\n*`"


def extract_answer(text):
    r"""Returns the final answer in a text, or None if it has none.

    It is in the last \boxed{}, whatever comes after that. Without a box it is the last answer that follows
    `Answer:`, #### or <answer>, in that line or below it, and without these the last one that follows
    `final answer is`. What stands before </think> counts only if there is no answer after it.
    """
    _, ended, rest = text.rpartition("</think>")
    if ended and (answer := extract_answer(rest)):
        return answer
    opened, boxes, others = [], [], []
    for mark in MARKS.finditer(text):
        if mark[0] == "}":
            if opened and (start := opened.pop())[0] != "{":
                boxes.append((start.end(), mark.start()))
        elif mark["token"]:
            boxes.append(mark.span("token"))
        elif mark[0][-1] == "{" and mark[0] != r"\{":
            opened.append(mark)
        elif mark[0][0] != "\\":
            others.append(mark)
    found, after = [], None
    for start, end in sorted(boxes, reverse=True):
        if found and not JOINT.fullmatch(text[end:after][:40]):
            break
        if box := text[start:end].strip(EDGES):
            found, after = (found if [box] == found[-1:] else [*found, box]), start
    if found:
        return ", ".join(reversed(found))
    for kind in ("mark", "words"):
        signs = [sign for sign in reversed(others) if kind == "words" or not sign["words"]]
        for sign, following in zip(signs, [None, *signs]):
            # The answer that a sign announces ends before the next sign.
            below = text[sign.end():following.start() if following else None].strip(EDGES)
            if below and sign[kind]:
                closed = sign[0][0] == "<" and following and following["end"]
                answer = FRAME.sub("", below if closed else displayed(below))
                if answer := answer.strip(EDGES).removesuffix("*.").strip(EDGES):
                    return answer


def displayed(text):
    # Returns the displayed formula that a text begins with, or its first line.
    for opening, closing in (("$$", "$$"), (r"\[", r"\]")):
        if text.startswith(opening):
            return text[2:].partition(closing)[0]
    return text.partition("\n")[0]


# ------------------------------------------------------------------------------------------------------------
# comparison. What does not count is removed from an answer. Then it is read as a tree: numbers become one
# exact fraction, and where there are letters, brackets or roots, tuples (operator, left, right) keep the
# formula.

CLEANING = [(re.compile(pattern), replacement) for pattern, replacement in [
    # These are one-letter units, which are written upright. m becomes unitm: a plain m may be a variable.
    (r"(?:(?<=[\d}])|(?<=\\pi))(?:[\s~]|\\[,;: ])*\\(?:text\s*\{\s*|mathrm\s*\{~)([acghjklmnstvw])\}",
     r" unit\1"),
    (r"\\(?:text\w*|math(?:rm|bf|it|sf|tt)|mbox|emph|operatorname|boldsymbol)\*?\s*\{([^{}]*)\}", r" \1 "),
    (r"\\begin\{[pb]?matrix\}|\\begin\{array\}\{[lcr|]*\}", r"\\matrix("),
    (r";\s*\[[\d.]+(?:pt|em|ex|mm)\]", ";"), (r";?\s*\\end\{(?:[pb]?matrix|array)\}", ")"),
    (r"\\(?:left|right|bigg?[lr]?|displaystyle)(?![a-z])|\\[()\[\]!]|\\?[$£€%]", ""),
    (r"\^\s*\{?\s*\\circ\s*\}?|(?<=\d)\s*\\circ(?![a-z])|°", ""),
    (r"(\d)\{,\}(?=\d{3}(?!\d))", r"\1,"), (r"\\[,;: ]|\\q?quad(?![a-z])|~", " "), (r"[−–]", "-"),
    (r"\\(?:times|cdot|ast)(?![a-z])|[×·⋅∙]", "*"), (r"\*\*", "^"), (r"\\div(?![a-z])|÷", "/"),
    (r"\\[dtc](frac|binom)(?![a-z])", r"\\\1"), (r"\\[lr]?vert(?![a-z])", "|"), (r"\\degree(?![a-z])", ""),
    (r"\\varnothing(?![a-z])", r"\\emptyset "), (r"\\lt(?![a-z])", "<"), (r"\\gt(?![a-z])", ">"),
    ("½", r"\\frac{1}{2}"), (r"\\frac\s*(\d)", r"\\frac{\1}"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    (r"\\leq?(?:slant)?(?![a-z])|≤|<=", r"\\le "), (r"\\geq?(?:slant)?(?![a-z])|≥|>=", r"\\ge "),
    (r"\\neq?(?![a-z])|≠|!=", r"\\ne "), (r"(?<![a-z\\])inf(?:inity)?(?![a-z])|∞", r"\\infty "),
    (r"(?<![a-z\\])(pi|sqrt|sin|cos|tan|log|ln)(?![a-z])", r"\\\1 "), ("π", r"\\pi "), ("√", r"\\sqrt "),
    (r"\\(sin|cos|tan|log|ln)\s*(?:(\d+|[a-z]|\\pi|\\theta)(?=\s*(?:[-+,)}=]|$))|\{(\w+)\})",
     r"\\\1(\2\3)"),
    ("∪", r"\\cup "), ("∩", r"\\cap "), ("∈", r"\\in "), ("±", r"\\pm "), ("θ", r"\\theta "),
    # This is a left side. The lookahead keeps it where other equations follow: x=1, y=2.
    (r"^\s*\\?[a-z][\w ]*(?:(?<=_)\{\w+\})?(?:\([a-z]\))?\s*(?:=(?!.*[,;].*=)|\\in(?![a-z]))", "")]]
# Two answers with different left sides of these kinds differ: x, x_1, xy, \cos x, and f(x). Words do not
# count: area = 5 is A = 5.
LEFT = [re.compile(r"[\s$]*((?:\\[a-zA-Z]+|(?<![a-zA-Z])[a-zA-Z]{1,2}(?![a-zA-Z])|[A-Z]{3}|_\w|_\{\w+\}|\s)+)"
                   r"=[^=]*$"), re.compile(r"[\s$]*([a-zA-Z]\([a-zA-Z]\))\s*=[^=]*$")]
# A unit is up to three words after a number, or a metric symbol right behind it. The words of OPERATOR are no
# units but part of the value. A word of two letters or without a vowel may be a product of variables, such as
# kT.
OPERATOR = ("or|and|not|plus|minus|times|over|mod|choose|less|more|squared|cubed|dozen|hundred|thousand|"
            "hal(?:f|ves)|quarters|(?:four|fif|six|seven|eigh|nin|ten|[a-z]+(?:ie|teen|red|sand))ths?|thirds|"
            "lakh|crore|gross|score|factorial|root|radical|to|out|through|versus|below|negative|at|modulo|"
            "[mbtr]+illion|[abcnxyz]{2,3}")
# This is a choice with its text, such as B) 12 or (B) 12, but not (A) and (B).
CHOICE = re.compile(rf"^(?:\(([a-j])\)|([a-j])[).:])(?:\s+(?!(?:{OPERATOR}|[a-j])\b)"
                    r"(?!.*\b[a-j]\))(?:\w|-?\d|\\frac|\\sqrt|\\pi).*)?$")
EXPONENT = r"(?:\s*\^[({]?[23][)}]?)?"
METRIC = rf"(?:[cmk]m|kg|ml){EXPONENT}"
NAME = rf"(?!(?:{OPERATOR})\b)(?:(?=[a-z]*[aeiouy])[a-z]{{3,}}|[cmk]m|kg|ml|ft|yd|sq){EXPONENT}"
WORD = (rf"(?:{NAME}|(?:[mglsh]|[dn]m|mg|in|mi|lbs?|oz|hrs?|yr|m?s|mph|kph|[kmg]?hz|[km]w|k?pa|[km]?j|"
        rf"[km]?ev|[kmgt]b|qt|pt|cc|pm|am|ms|ns){EXPONENT})(?![a-z])")
UNIT = re.compile(rf"(?:(?<=\d)\s+{WORD}|(?:(?<=[)}}])|(?<=\\pi))\s+{NAME})(?:[ /]{WORD}){{0,2}}$|"
                  rf"(?<=[\d)}}]){METRIC}$")
NAMED = re.compile(rf"\s*{NAME}(?:[ /]{WORD}){{0,2}}")
# A unit may follow these values, which are not exact: 2\sqrt{3} or 12\pi.
ROOTS = re.compile(r"(?:[\d\s.+*/^(){}-]|\\(?:frac|sqrt|pi)(?![a-z]))*")
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?")
MIXED = re.compile(r"([-+]?)\s*(\d+)\s+(\d+)/(\d+)")
# Each text holds the names of one unit. Two answers with different units from this table are never equal.
UNITS = {name: number for number, names in enumerate([
    "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre",
    "in inch inche", "ft foot feet", "yd yard", "mi mile", "mg milligram", "g gram", "kg kilogram",
    "ml milliliter millilitre", "l liter litre", "s sec second", "min minute", "h hr hour", "day", "week",
    "month", "yr year"]) for name in names.split()}
CURRENCIES = [re.compile(pattern, re.I) for pattern in [
    r"\\\$|^[^$]*\$[^$]*$|\bdollars?\b", r"€|\beuros?\b", "£", r"¢|\bcents?\b"]]


def plain(text):
    """Returns the text without currencies, %, capitals, a leading `x =`, a last period and LaTeX's spaces."""
    # A longer text is no answer, and some of the patterns take quadratic time.
    if len(text) > 500:
        return text
    text = text.replace("\\\\", ";" if r"\begin" in text else "\\").replace("&", ",")
    # \Delta has to stay different from \delta.
    text = re.sub(r"\\(?!Big)([A-Z])", r"\\upper\1", text).lower()
    for pattern, replacement in CLEANING:
        text = pattern.sub(replacement, text)
    text = text.strip()
    return text if text.endswith("..") else text.rstrip(" .,;")


def power(base, exponent):
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * size > 4096:
        return "^", base, exponent
    return base ** exponent


def negative(tree):
    if isinstance(tree, Fraction):
        return -tree
    # The sign of a product goes to its first factor.
    return (tree[0], negative(tree[1]), tree[2]) if tree[0] in ("*", "/") else ("-", tree)


# Operators by how tightly they bind; the last one, between a and b in `ab`, is a product.
LEVELS = [[";"], [","], ["=", "<", ">", r"\le", r"\ge", r"\ne", r"\in"], [r"\cup", r"\cap", r"\setminus"],
          ["+", "-", r"\pm", r"\mp"], ["*", "/", ""], ["^"], ["_"]]
PRECEDENCE = {op: level for level, ops in enumerate(LEVELS, 1) for op in ops}
SUM, ATOM = PRECEDENCE["+"], len(LEVELS)
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "^": power}
SIGNS = LEVELS[SUM - 1]
CLOSING = {"(": [")", "]"], "[": [")", "]"], r"\of": [")"], "{": ["}"], r"\{": [r"\}"]}
ENDS = ["", ")", "]", "}", r"\}"]


def value(text):
    """Returns the exact value of plain text like -3, 1,234, 0.5, 1 1/2, 5 cm or 2*(3+4)^2 as a Fraction.

    For other formulas it returns a tree of nested tuples, which keeps the order of the terms, and None for a
    text that is no formula.
    """
    # This limits the depth of the recursion as well.
    if len(text) > 300:
        return None
    bare = UNIT.sub("", text)
    if THOUSANDS.fullmatch(bare):
        bare = re.sub("[, ]", "", bare)
    elif (mixed := MIXED.fullmatch(bare)) and int(mixed[3]) < int(mixed[4]):
        bare = MIXED.sub(r"\1(\2+\3/\4)", bare)
    tree = tree_of(bare)
    named = ROOTS.fullmatch(bare) and NAMED.fullmatch(text[len(bare):])
    return tree if bare == text or isinstance(tree, Fraction) or named else tree_of(text)


def tree_of(text):
    tokens = ["", *reversed(re.findall(
        rf"(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{{1,3}}(?!\d|\s*_))?|\\[a-z]+|\\.|\S", text))]

    def parse(level):
        # Reads on as long as the operators bind more tightly than the level.
        tree, op = prefix(level), None
        while tokens[-1] not in ENDS:
            # 3*4! is 3*(4!).
            if tokens[-1] in ("!", "'"):
                tree = tokens.pop(), tree
                continue
            before, op = op, tokens[-1] if tokens[-1] in PRECEDENCE else ""
            if PRECEDENCE[op] <= level:
                break
            if op:
                tokens.pop()
            elif before == "/":
                raise ValueError("1/2x may be x/2")
            elif tokens[-1] == "(" and not isinstance(tree, Fraction):
                # f(x)^2 is not f(x^2).
                tokens[-1] = r"\of"
            tree = applied(op, tree, parse(PRECEDENCE[op] - (op == "^")))
        return tree

    def prefix(level):
        token = tokens.pop()
        if token in SIGNS:
            tree = parse(max(level, SUM))
            return tree if token == "+" else negative(tree) if token == "-" else (token, tree)
        if token in CLOSING:
            tree, end = parse(0), tokens.pop()
            if end not in CLOSING[token]:
                raise ValueError("unbalanced brackets")
            grouped = token + end in ("()", "{}") and not (isinstance(tree, tuple) and tree[0] in (",", ";"))
            return tree if grouped else (token, tree, end)
        if token in ENDS or token in PRECEDENCE:
            raise ValueError("no operand")
        if token == r"\frac":
            return applied("/", prefix(ATOM), prefix(ATOM))
        if token == r"\sqrt":
            index = prefix(ATOM) if tokens[-1] == "[" else 2
            return token, index, prefix(ATOM)
        if not re.match(r"\.?\d", token):
            return token
        if token.isdigit() and tokens[-1] == r"\frac":
            part = parse(ATOM)
            if isinstance(part, Fraction) and 0 < part < 1:
                return Fraction(token) + part
            return applied("", Fraction(token), part)
        return Fraction(token)

    with contextlib.suppress(ValueError, ZeroDivisionError, RecursionError):
        tree = parse(0)
        return tree if tokens == [""] else None


def applied(op, a, b):
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        if not op:
            raise ValueError("2 3 may be 6 or 23")
        if op in OPERATIONS:
            return OPERATIONS[op](a, b)
    return op or "*", a, b


def comparison(given, truth):
    """Returns whether two answers are the same, or None if algebra could still show that they are.

    They are the same if they are equal as exact values or formulas, or as text if one of them is no formula.
    Spaces, LaTeX's spellings, currencies and % do not count: 50% is 50, but 0.5% is not 0.5. A unit or a
    letter before = counts only if both answers have one, and capitals count only if one formula has both m
    and M. It never raises, and no input makes it slow.
    """
    percent = len({bool(re.search("%|percent", each)) for each in (given, truth)}) > 1
    differ = any(len({"".join(re.findall(r"\\(?!angle)[a-zA-Z]+|\w|[()]", match[1]))
                      for each in (given, truth) if (match := left.match(each[:500]))}) > 1 for left in LEFT)
    money = [{sign for sign in CURRENCIES if sign.search(each)} for each in (given[:500], truth[:500])]
    if any(map(both_cases, (given, truth))):
        given, truth = (re.sub(r"(\\[a-zA-Z]+)|([A-Z])", capital, each) for each in (given, truth))
    choice = re.search(r"[A-J]", truth)
    given, truth = plain(given), plain(truth)
    if choice and re.fullmatch(r"\(?[a-j]\)?", truth):
        given = CHOICE.sub(r"\1\2", given)
    if differ or all(money) and not money[0] & money[1] or len({unit(given), unit(truth)} - {None}) > 1:
        return False
    trees = value(given), value(truth)
    if None in trees:
        return squeezed(given) == squeezed(truth) != "" or None
    numbers = all(isinstance(tree, Fraction) for tree in trees)
    if trees[0] == trees[1] and not (percent and numbers and 0 < abs(trees[0]) < 1):
        return True
    # 3 h is 3h, whether h is a unit or a variable.
    if not numbers and tree_of(given) == tree_of(truth) is not None:
        return True
    # Algebra cannot make two numbers equal, except 50% and 0.5, nor numbers in a base or different brackets.
    formulas = [tree for tree in trees if isinstance(tree, tuple)]
    in_base = any(tree[0] == "_" and isinstance(tree[1], Fraction) for tree in formulas)
    brackets = {tree[0].strip("\\") + tree[2].strip("\\") for tree in formulas if tree[0] in CLOSING}
    decided = (numbers and not percent) or in_base or len(brackets) > 1
    return False if decided else None


def both_cases(text):
    # Returns whether a formula has the same letter as a capital and as a small one. Words do not count.
    letters = set(re.sub(r"\\(?:text|math)\w*\s*\{[^{}]*\}|\\[a-zA-Z]+|\b[A-Z]?[a-z]{2,}\b", "", text))
    return any(letter.swapcase() in letters for letter in letters if letter.isalpha())


def capital(match):
    return match[1] or rf"\upper{match[2]} "


def unit(text):
    # Returns what is known of the text's unit, or None: a sorted tuple of units, exponents, and / for per.
    found = UNIT.search(text) if len(text) <= 300 else None
    known, before = [], ""
    for word in re.findall("[a-z]+|[/23]", found[0]) if found else []:
        word = {"per": "/", "square": "2", "sq": "2", "cubic": "3"}.get(word, word)
        if word in "/23":
            known.append(word)
        # In `cm in total`, cm is the unit.
        elif before in ("", *"/23"):
            letter = re.fullmatch("unit(.)", word)
            name = letter[1] if letter else word
            number = UNITS.get(name, UNITS.get(name.rstrip("s"), letter and name))
            known += [] if number is None else [f"unit {number}"]
        before = word
    return tuple(sorted(known)) if any(word[0] == "u" for word in known) else None


def squeezed(text):
    # Removes spaces, except between digits: 1 2 is not 12.
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(text.split()))


def check_answer(text, truth, algebra=False):
    """Returns whether a completion's final answer is the truth.

    truth: a text, which may be a worked solution, or a list of texts, of which one is enough. algebra:
    whether to ask the package math-verify where exact values do not decide. Set a time limit for that.
    """
    given = extract_answer(text)
    for one in truth if isinstance(truth, (list, tuple)) else [truth]:
        one = extract_answer(one) or one
        same = None if given is None else comparison(given, one)
        if same or same is None and algebra and by_algebra(given, text, one):
            return True
    return False


# ------------------------------------------------------------------------------------------------------------
# algebra, by the package math-verify

# Python's own arithmetic takes minutes for these numbers, and no time limit can interrupt it.
HUGE = re.compile(r"\d{5,}[\s)}]*!|\^[\s({]*-?(?:\d{5,}|\d+[\s)}]*\^)")


def by_algebra(given, text, truth):
    # If the text has no marked answer, the package looks for one in its last lines.
    given = "\n".join(text.splitlines()[-10:])[-2000:] if given is None else formula(given)
    if len(given) + len(truth) > 3000 or HUGE.search(given) or HUGE.search(truth):
        return False
    # Only those who use the package wait for this import.
    import math_verify
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The package's own time limits are off, because they use SIGALRM, which another library may be using. Its
    # default rounding would take 3.14159265 for pi.
    given, truth = (math_verify.parse(each, parsing_timeout=None) for each in (given, formula(truth)))
    return math_verify.verify(truth, given, float_rounding=30, timeout_seconds=None)


def formula(text):
    # Returns an answer in the form that math-verify reads: in dollars, and with at most one \text, because
    # the package takes everything from the first \text to the end for a unit.
    text = re.sub(r"(?<!\\)(?:\$|\\[()\[\]])", "", text)
    text = re.sub(r"\\math(?:bf|rm)\s*\{([a-zA-Z])\}", r" \1", text)
    if text.count(r"\text") > 1:
        text = re.sub(r"\\text\w*\s*\{([^{}]*)\}", r" \1 ", text)
    return f"${text}$"
