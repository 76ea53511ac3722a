r"""Answers: which final answer a completion gives, and whether it is the right one.

    extract_answer  finds the final answer in a text: in a \boxed{}, behind `Answer:`, or at the end
    read            gives the exact value of an answer, which all its spellings have in common
    comparison      says whether an answer is the right one, where exact values decide that
    check_answer    says whether a completion's final answer is the right one
"""
import contextlib
import functools
import itertools
import json
import logging
import math
import re
from collections import namedtuple
from decimal import Decimal
from fractions import Fraction
from unicodedata import normalize

# ------------------------------------------------------------------------------------------------------------
# extraction: where an answer stands

# A line per language, or for related ones: words for `answer`, for `is`, and for `so`. Add a line for yours.
LANGUAGES = [
    ("answer|ans|(?:correct|best) (?:option|choice)", r"is|are|equals|\w{1,9} be",
     "so|thus|hence|therefore|results?|value|number|(?:i|we) get|(?:it|that).?i?s|option|choice|choose|pick"),
    ("答案|答|正确选项", "是|为|為|应[是为]|應[是為]|等于", "结果[是为]?|因此|所以是?|等于|解|故?[应應]?[选選][项項择擇]?|故"),
    ("答え|解答|正解|정답|답", "は|은|는", "よって|따라서"),
    ("respuesta|resposta|risposta|răspuns|opción correcta|réponse", "es|é|è|son|são|sono|este|est|sont|vaut",
     "resultado|risultato|résultat|solution|total|donc"),
    ("antwort|antwoord|lösung|svaret|svar|vastaus|richtige option", "ist|lautet|är|er", "ergebnis|also"),
    ("ответ|вариант|відповідь|отговор|odpowiedź|odpověď", "равен|это|є|е|je|jest|wynosi", "итак|результат"),
    ("cevap|đáp (?:án|số)|jawaban(?:nya)?|yanıt|válasz|απάντηση", "là|(?:ad|i)alah|az|είναι", "kết quả là"),
    ("उत्तर|উত্তর|คำตอบ|الإجابة|الجواب|پاسخ|תשובה", "है|হলো?|คือ|هي|هو|برابر|היא", "∴|⇒|=>")]
NOUN, VERB, SO = ("|".join(column) for column in zip(*LANGUAGES))
# Not inside a Latin word
EDGE = "(?!(?<=[a-z])[a-z])"
# An answer begins behind these: `**Answer**: 18`, `"answer": 18`, `Answer - 18`, <answer>, a line that says
# only `Final Answer`, [[18]], and GSM8K's ####, unless that is a heading with text below it. If there are
# none of them, these count: `the answer in dollars is 18`, `the answer would be: B`.
SIGNS = [re.compile(pattern, re.M | re.I) for pattern in [
    rf"(?:{NOUN})[\"'*_)`]*(?:】?\s*[:：=＝]|】|\s+(?:[-–—→]|->)\s)|(?=<(?:solution|(?:final_?)?answer)>)|"
    rf"(?:(?<![^\n#*])|(?<=# )|(?<=final ))(?:{NOUN})(?: \w{{1,12}})?[* \t\r]{{0,9}}$|"
    r"\[\[(?=[^\[\]\n]{1,99}\]\])|(?<!#)####(?!#)(?![ \t]*\**[a-z][^\n]{0,80}\n\s{0,9}\S)",
    rf"(?:{NOUN}){EDGE}[^\n.:：。!?=<>]{{0,60}}?(?:{EDGE}(?:{VERB}){EDGE}"
    rf"(?: (?:therefore|thus|then|simply|just|equal to|option|choice|la|a letra){EDGE})*\s*[:：]?|[:：])"]]
# What leads to an answer in the last line, as in `So the total is 18` and `Janet makes 9*2 = 18`
LEADING = re.compile(rf"(?i)^(?:.*{EDGE}(?:{SO})(?:\b.{{0,60}}\b(?:{VERB}|get|have)\b)?{EDGE}[\s,:：*}}]*)?"
                     r"(?:[^=]*(?<![\\a-zA-Z])(?:[^\W\d_]{3,}|is|we|to|it)(?![^\W\d_])[\s,:：}]*(?=[^=]*=))?")
# What may follow an answer in its line: `18 because`, `18 is the answer`, `18</s>`
TAIL = re.compile(rf"(?is)(?:[ ,]?\(?{EDGE}(?:because|since|i hope|(?:is|as) (?:the )?(?:correct|right|final|"
                  rf"answer|required)|是?正确|选项[。.]?$|因为|です|である|[とに]なりま|입니다|이다|है|।){EDGE}|</|<\|).*")
# The end of what {"answer": "18", "why": "9*2"} says, and of a sentence, but not of `B.` in `B. Paris`
STOP = re.compile(r"\"\s*[,}]|,\s*\"|[。！]|(?<!^[a-zA-Z])(?<![. ][a-zA-Z])[.!][\"*)$]{0,4}\s+(?=[A-Z])")
# Words that change a number: 18 is no answer in `at least 18`, `the square root of 18` and `18 thousand`.
OPERATOR = (r"(?:or|and|not|no|never|cannot|\w+n't|without|than|about|around|over|under|below|of|from|to|by|at|"
            r"plus|minus|times|twice|double|triple|half|halves|thirds|"
            r"root|out|squared|cubed|factorial|dozen|hundred|thousand|\w+illion|(?!mon)\w*[defghnrx]ths?)\b")
# A number in a sentence: `She makes 18 dollars.`
SUBJECT = rf"(?i)^(?!.*\b{OPERATOR})(?:[^\W\d]+ [^\W\d][^\d=\\]* |[一-鿿]{{2,}})"
SENTENCE = re.compile(SUBJECT + r"([-*$€£]*\d[^=\\]*)$")
# A box, with brackets in it up to eight levels deep, or \boxed 5; before it, what joins it to another one
INSIDE = r"(?:[^{}\\]|\\.|\{" * 8 + "[^{}]*+" + r"\})*+" * 8
BOX = re.compile(r"(?s)([\s$]{0,9}+(?:,\s{0,9}+(?:and\b)?|and\b)[\s$]{0,9}+)?"
                 rf"\\(?:(?:boxed|fbox)\s*+\{{(?!\s*\}})({INSIDE})\}}|boxed\s+([^\s{{}}$]+))")
# A bracket that the answer has not opened, as in {"answer": 18} and [[18]]
UNOPENED = re.compile(rf"^(?:({INSIDE})\}}|([^][]*)\]\]).*")
# What a text may end with: **18**, `18`, $$18$$, \[18\], and $18$ or \(18\) in a line of its own
FRAMED = re.compile(r"(?s)(?:\*\*|`|\$\$|\\\[|\n\$|\n\\\()((?:(?!\*\*|`|\$\$|\\\[).)+)(?:[*`$]+|\\[])])$")
EDGES = " \t\r\n*`\"'“”"
# `= 2*9 =` in `x = 2*9 = 18`, where no = is part of <= or =>
CHAIN = re.compile(r"(?<![<>!=:])=(?![=>])(?:(?:(?!\b(?:and|or)\b|[,;，；]\D).)*(?<![<>!=:])=(?![=>]))?")
# `Let x = 5`, `Step 2`; and a text with a word, or with a sign that no answer has
ASSUMPTION = re.compile(r"\W*(?:let|suppose|assume|if|when|where|step|first|next|set|say|try)\b|设|若|假设", re.I)
WORDY = re.compile(r"(?<![\\a-zA-Z])[^\W\d_]{3,}|#|^\{")


def extract_answer(text):
    r"""Return the final answer in a text, or None if it has none.

    It is in the last \boxed{}, whatever comes after that. Without a box it is behind the last of SIGNS, and
    without these it is what the text ends with: an equation, something bold or fenced, or a line with nothing
    but an answer. What stands before </think> counts only if there is no answer after it.
    """
    _, ended, rest = text.rpartition("</think>")
    return ended and extract_answer(rest) or boxed_answer(text) or marked_answer(text) or last_answer(text)


def boxed_answer(text):
    # Returns the content of the last box, or of several: `\boxed{1} and \boxed{2}` are one answer.
    answers, end = [], 0
    for box in BOX.finditer(text[-100_000:]):
        joint, braced, bare = box.groups()
        if not joint or box.start() > end:
            answers = []
        answers.append((braced or bare).strip(EDGES))
        end = box.end()
    return boxed_answer(answers[-1]) or ", ".join(dict.fromkeys(answers)) if answers else None


def marked_answer(text):
    # Returns the answer behind the last sign. A longer text is no answer but the beginning of a solution.
    # The last 10,000 characters are enough, and keep this quick.
    answers = (announced(below) for signs in SIGNS for below in reversed(signs.split(text[-10_000:])[1:]))
    return next((answer for answer in answers if 0 < len(answer) <= 100), None)


def announced(below):
    # Returns the answer at the beginning of the text between a sign and the next one. It is a line, and in
    # <answer> it may be several.
    lines = [*re.findall(r"(?s)^<\w+>(.*?)</", below), *re.sub(r"^<\w+>", "", below).split("\n")]
    line = next((line for line in lines if re.search(r"\w", line)), "").strip(EDGES)
    # `Answer: The answer is 18`
    line = marked_answer(line[:300]) or line
    line = UNOPENED.sub(r"\1\2", TAIL.sub("", STOP.split(line, maxsplit=1)[0]))
    return SENTENCE.sub(r"\1", line).strip(EDGES).removesuffix("*.").strip(EDGES)


def last_answer(text):
    # Returns the answer that a text ends with.
    whole = text.strip()
    text = whole.rstrip(".。．! ")
    framed = FRAMED.search(text[-1000:])
    line = (framed[1].strip(EDGES) if framed else text).rpartition("\n")[2]
    rest = CHAIN.sub("=", LEADING.sub("", TAIL.sub("", line[-300:]))).strip(EDGES)
    # A text that is no formula has its tokens apart. B) 12 may be the last of the choices.
    reading = read(rest)
    number = isinstance(reading.value, Fraction)
    formula = not reading.choice and (number or " " not in reading.value and not WORDY.search(rest))
    answer = formula or CHAIN.search(rest) or framed and len(rest) <= 100
    if not rest or len(line) > 300 or ASSUMPTION.match(line):
        return None
    if answer:
        return rest
    # `So he has 7 apples left.` A sentence without a full stop may have been cut off.
    sentence = whole != text and MEASURED.match(STOP.split(line)[-1])
    return sentence[1] if sentence else None


# ------------------------------------------------------------------------------------------------------------
# spellings: signs and notations that mean the same become one

FUNCTIONS = "sqrt sin cos tan arcsin arccos arctan log ln".split()
# Each sign, and its other spellings. 3/4 may be a fraction, but 3÷4 is none.
SPELLINGS = {each: sign + " " * ("\\" in sign) for sign, names in {
    **{rf"\{name}": name for name in FUNCTIONS}, "*": r"\times \cdot \ast × · ⋅ ∙", "^": "**", "*1/": r"\div ÷",
    "-": "− – —", ":": r"∶ \colon", "<": r"\lt", ">": r"\gt", r"\le": r"\leq \leqslant ≤ ⩽ <=", r"\pm": "±",
    r"\ge": r"\geq \geqslant ≥ ⩾ >=", r"\ne": r"\neq ≠ !=", "|": r"\mid \vert \lvert \rvert ∣", r"\pi": "π pi",
    r"\frac": r"\dfrac \tfrac \cfrac", r"\binom": r"\dbinom \tbinom", r"\infty": "∞ infinity inf", r"\cap": "∩",
    r"\theta": "θ", r"\sqrt": "√ sqrt", r"\cup": r"∪ \bigcup", r"\in": "∈", r"\emptyset": r"\varnothing ∅",
    "mi/h": "mph", "km/h": "kph", "/": "⁄", "%": r"\% percent", ",": "、 &", " ": r"\, \; \: \quad \qquad ~",
    "": r"\! \( \) \[ \] \$ $ £ € ¥ ₹ \degree ° \displaystyle"}.items() for each in names.split()}
CURRENCIES = {"$": "dollar", "€": "euro", "£": "sterling"}


def improper(match):
    # Returns 1\frac12 as \frac{3}{2}.
    whole, top, bottom = [int(digits.strip("{}")) for digits in match.groups() if digits]
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


def decimal(match):
    # Returns 1.5*10^3 as 1500, and 10^3 as 1000.
    return format(Decimal(f"{match[1] or 1}e{match[2] or match[3]}"), "f")


CLEANING = [(re.compile(pattern), replacement) for pattern, replacement in [
    # NFKC makes full-width signs plain, but it would make 1½, x², a₁ and ①② the numbers 11/2, x2, a1 and 12.
    # Characters without width go.
    ("[¼-¾⅐-⅞]", r" \g<0>"), ("[²³¹⁰⁴-⁹⁺⁻]+", r"^{\g<0>}"), ("[₀-₉]+", r"_{\g<0>}"), ("[①-⑳]", r"(\g<0>)"),
    ("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]", ""), (r"[\s\S]+", lambda found: normalize("NFKC", found[0])),
    # A matrix becomes (1,2;3,4). Elsewhere \\ is \
    (r"\\\\(?:\[\w+\])?(?=[\s\S]*\\end)", ";"), (r"\\\\", r"\\"), (r"\\ ", " "),
    (r"\\begin ?\{(?:[pb]?matrix|array)\}(\{[lcr|]*\})?", "("), (r";?\s*\\end ?\{(?:[pb]?matrix|array)\}", ")"),
    # 11{,}111 and 11,\! 111
    (r"(?<=\d)(?:\{,\}|,?(?:\\[!,;:]\s*)+,?)(?=\d{3}(?!\d))", ","),
    # 90^\circ and 90\circ, but not f\circ g
    (r"\^\s*\{?\s*\\circ\s*\}?|(?<=\d)\s*\\circ(?![a-z])", ""), (r"\\(?:left|right|[bB]ig+[lr]?)\b", ""),
    # \$5 and -$5, but not $5$; €5 and 5€
    (r"^\s*([-+]?)\s*(\\\$|\$(?=[^$]*$)|[€£])\s*([-+]?[\d.,]*\d)\.?\s*$",
     lambda found: f"{found[1]}{found[3]} {CURRENCIES[found[2][-1]]}"), (r"(?<=\d)\s*€\W*$", " euro"),
    (r"\\[a-zA-Z]+|\\.|\*\*|[<>!]=|[a-zA-Z]+|[^\w\s]|[πθ]", lambda found: SPELLINGS.get(found[0], found[0])),
    # An upright N after a number is a unit, here nn, and a plain one may be a variable; \text{cm}, \mathbf{x}
    (r"((?:[\d}]|\\pi)\s*)\\(?:text|mathrm)\s*\{\s*([JNWVKCFTHA])\s*\}", r"\1 \2\2"),
    (r"\\(?:text\w*|math[a-z]{2}|mbox|underline|emph|operatorname|boldsymbol)\*?\s*\{([^{}]*)\}", r" \1 "),
    # One or more choices or statements: B, (B), BC, B and C, (1)(3)
    (r"^\W*(?:(?i:option|choice)|选项?)?\s*((?:\(?[A-J]\)?(?:[\s.,;:*`\"{}]|and)*)+|"
     r"(?:\(\d\)(?:[\s,;]|and)*){2,})$", lambda found: ", ".join(re.findall(r"[A-J\d]", found[1])).lower()),
    # 3:07pm, and 3 p.m.
    (r"(?i)(?:(?<=:\d\d)\s*([ap])m|(?<=\d)\s*([ap])\.\s?m\.?)\W*$",
     lambda found: f" {found[1] or found[2]}m".lower()),
    # Words have no capitals, but m and M, and kT and KT are not the same.
    (r"(?<![a-zA-Z\\])(?:[A-Z]?[a-z]{2,}|[A-Z]{2,}|No)(?![a-zA-Z])", lambda found: found[0].lower()),
    # 0.5% is 0.005 (but 50% is 50); \{x: x>3\}, and (1, 2] U [3, 4)
    (r"(?<!\d)(0?\.\d+)\s*%", r"\1e-2"), (r"(\\\{ ?[a-z] ?):", r"\1|"),
    (r"(?<=[)\]]) ?U ?(?=[(\[])", r"\\cup "),
    # Scientific notation is one number, and so are 1 1/2 and 1\frac12.
    (r"(?<![\d.^_])(?:(\d+\.?\d*|\.\d+)\s*[*x]\s*)?10\s*\^\s*"
     r"(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3})(?!\.?\d))(?!\s*[\^!])", decimal),
    (r"(?<![\d./^])(\d+)\s*(?:\\frac\s*(\d|\{\d+\})\s*(\d|\{\d+\})|(?<=\s)(\d+)/(\d+)(?![\d./]))",
     improper),
    # 3, 5, and 7; but not x < 1 or x > 2, nor with words: odd and even
    (r"(?<=[\w}).])\s*,?\s*(?:\b(?:and|or)\b|[和或])\s*(?!.*(?:[<>]|\\[lgn]e |(?<![\\a-z])[a-z]{3}))", ", "),
    # 9 (apples), and a last period
    (r"(?<=\d)\s*\(([a-zA-Z ]{3,})\)\s*$", r" \1"), (r"^[\s\"“”*`]+|(?<![.\s])\s*\.?[\s,;。\"“”*`]*$", "")]]


# ------------------------------------------------------------------------------------------------------------
# reading: the value of an answer. Numbers become one exact fraction, and where there are letters, brackets or
# roots, tuples (operator, left, right) keep the formula.

# The names of each unit. Two answers with different units from this table are never equal.
UNITS = {name: names.split()[0] for names in ("mm millimeter millimetre 毫米|cm centimeter centimetre 厘米|"
    "m meter metre 米|km kilometer kilometre 千米|in inch inche|ft foot feet|yd yard|mi mile|mg milligram|"
    "g gram 克|kg kilogram 千克|lb pound|oz ounce|ml milliliter|l liter litre|s sec second 秒|min minute 分钟|"
    "h hr hour 小时|day 天|week 周|month 月|yr year 年|/ per|2 square sq|3 cubic|am|pm|dollar 美元|cent|euro|"
    "sterling|jj|nn|ww|vv|kk|cc|ff|tt|hh|aa").split("|") for word in names.split() for name in (word, word + "s")}
# Other words after a number are units as well, up to three of them, if they do not change its value. A word
# of two letters or without a vowel may be a product of variables, such as kT. In 12元 and 5厘米 the unit is
# written without a space, but 7万 is 70,000, and 7以上 is 7 or more.
NAME = (rf"(?!{OPERATOR}|[abcnxyz]{{3}}\b|мил|млн|тыс|\w*(?!千[克米瓦])[万萬亿億兆百千十割折半之倍多余以未和或만억천백십이미])"
        r"(?:(?=[a-z]*[aeiouy])[a-z]{3,}|[^\W\d_a-zA-Z]{1,10}|[cmk]m|kg|ml|ft|yd|sq)")
WORD = rf"(?:{NAME}|{'|'.join(filter(str.isalpha, UNITS))})(?![a-zA-Z])(?:\s*\^[({{]?[23][)}}]?)?"
BEHIND = rf"(?:\s+|(?={NAME})){WORD}(?:[ /]+{WORD}){{0,2}}$"
UNIT = re.compile(rf"^((?:[^a-zA-Z\\]|\\[a-z]++)*(?<=[\d)}}i])){BEHIND}")
# A sentence that ends with a number and its unit: 7 apples, $18, 20%
MEASURED = re.compile(rf"{SUBJECT}((?=.*(?:[$€£%°]|[^\W\d_]))[-*$€£]*\d[\d.,/]*[$%°*]*(?:$|{BEHIND}))")
# A choice with its text, B) 12, but not (A) or (B). Or a left side such as x =, f(x) =, 2*9 =, x = 2*9 =, or
# x \in; but x=1, y=2 stays as it is.
LEFT = re.compile(r"\s*(?:\(?([A-J])[).:,](?!.*\b[A-J]\b(?! [a-z]{2}))|"
                  r"(?:(\\?[a-zA-Z][\w ]*(?:(?<=_)\{\w+})?(?:\([a-zA-Z]\))?)\s*(?:=(?!.*[,;].*=)|\\in\b))?"
                  r"(?:(?:[^\w\\,;]|\d|\\[a-z]++)*=(?!\s*[a-z]))?)")
# What looks like a sum or a quotient, but is a date, a time, a range, a score or a ratio; or several of them
DATE = "N(?:(?:-N)+|(?:/N){2,}|(?::N)+)"
JOINED = re.compile(f"{DATE}(?:[,;]{DATE})*".replace("N", r"\d+(?:,\d{3})*(?:\.\d+)?%?"))
# 1,234.5 or 1 234.5
THOUSANDS = re.compile(r"[-+]? ?[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)? ?%?")
# A digit of \frac12, a number such as 5, .5 or 1.2e5, a command such as \pi, a word, or a character except %
TOKEN = re.compile(r"(?i)(?<=\\frac)\s*\d|\.?\d+\.?\d*(?:e[-+]?\d{1,3}(?![\d_]))?|\\[a-z]+|\\.|[a-z]{4,}|[^\s%]")
# Operators by how tightly they bind, after what ends an operand: `*` stands also between a and b in `ab`, and
# `(` is the one of f(x), but not of (x+1)(x-1).
LEVELS = [r") ] } \}", ";", ",", r"= < > \le \ge \ne \in", r"\cup \cap", r"+ - \pm \mp", "* /", "^", "_ ("]
PRECEDENCE = {"": 0, **{op: level for level, ops in enumerate(LEVELS) for op in ops.split()}}
SUM, ATOM = PRECEDENCE["+"], PRECEDENCE["_"]
BRACKETS = {"()": "()", "{}": "{}", r"\{\}": "{}", "[]": "[]", "[)": "[)", "(]": "(]"}
FOLDS = {"+": sum, "*": math.prod}


def value(text):
    """Return the exact value of text like -3, 0.5, 1/2 or 2*(3+4)^2 as a Fraction, and the set of its steps.

    A step is an operation between plain numbers that is still to be carried out: "+" in 5-3 and in x+5-3.
    For other formulas the value is a tree of nested tuples, in which the order of terms, of factors, and of a
    list 2, 1 or a set does not count; for a text that is no formula it is None.
    """
    # 1 \pm x is the list 1+x, 1-x, and a list is the set {1+x, 1-x}.
    text = re.sub(r"^([^,;(]*)\\pm([^,;(]*)$", r"\1+\2,\1-\2", text)
    tokens = ["", "}", *reversed(TOKEN.findall(text)), "{"]
    steps = set()

    def combined(op, a, b):
        # Returns `a op b`, and notes a step if plain numbers meet in it: 2 and 2 in (x+2)+2 and in 2x*2, or
        # \sqrt2 and \sqrt3. A fraction of whole numbers, such as 3/4 or 3x/4, is no step, nor is 3\sqrt2.
        kind = {"-": "+", "/": "*"}.get(op, op)
        first, second = [operands(kind, tree)[0] for tree in (a, b)]
        plain = isinstance(first, Fraction) + isinstance(second, Fraction)
        whole = plain == 2 and first.denominator == second.denominator == 1
        fraction = op == "/" and whole and second and first % second
        if op in "+-*/^" and not fraction and (plain == 2 or plain == 0 and is_number(a) and is_number(b)):
            steps.add(kind)
        return applied(op, a, b)

    def parse(level):
        # Reads an operand, and goes on as long as the operators bind more tightly than the level.
        token = tokens.pop()
        if PRECEDENCE.get(token) == SUM:
            operand = parse(max(level, SUM))
            if isinstance(operand, Fraction) and operand < 0:
                steps.add("+")                                  # -(-5)
            tree = applied(token, Fraction(0), operand)
        elif token in ("(", "[", "{", r"\{"):
            tree = parse(0)
            name = BRACKETS[token + tokens.pop()]
            # (5) is 5, but (1, 2) is a pair. The order of a set does not count, but that of 1; 2 does.
            if isinstance(tree, tuple) and tree[0] in (",", ";"):
                tree = name, *(sorted(tree, key=repr) if name == "{}" and tree[0] == "," else tree)
        elif token == r"\frac":
            top = parse(ATOM)
            tree = combined("/", top, parse(ATOM))
        elif token[1:] in FUNCTIONS and tokens[-1] not in ("^", "_"):
            index = parse(ATOM) if tokens[-1] == "[" else None
            argument = parse(ATOM)
            if is_number(argument):
                steps.add(token)
            tree = token, index, argument
        else:
            # There is no fraction of ! and ).
            tree = token if re.match(r"[^\W\d_]|[\\|]", token) else Fraction(token)
        while True:
            op = tokens[-1]
            if op not in PRECEDENCE or op == "(" and (isinstance(tree, Fraction) or tree[0] in "+*"):
                op = "*"
            if PRECEDENCE[op] <= level:
                return tree
            if op == tokens[-1] != "(":
                tokens.pop()
            elif re.match(r"\.?\d", tokens[-1]) and (not isinstance(tree, tuple) or tree[0] == "*"):
                raise ValueError("2 3 may be 23, and words have no value: the 2 of 3")
            tree = combined(op, tree, parse(PRECEDENCE[op] - (op == "^")))

    with contextlib.suppress(ValueError, LookupError, ZeroDivisionError, RecursionError):
        tree = parse(0)
        if tokens == [""]:
            return tree, steps
    return None, set()


def is_number(tree):
    # Whether a formula has no variable.
    if isinstance(tree, tuple):
        return all(map(is_number, tree[1:]))
    return isinstance(tree, Fraction) or tree in (None, r"\pi")


def operands(op, tree):
    # Returns the terms of a sum, the factors of a product, or the members of a list; (a^b)^c is not a^b^c.
    return tree[1:] if isinstance(tree, tuple) and tree[0] == op != "^" else (tree,)


def applied(op, a, b):
    # The numbers of a sum or a product become one number, and the order of the rest does not count.
    if op in ("-", "/"):
        # a-b is a + b*(-1), and a/b is a * b^(-1).
        op, inverse = ("+", "*") if op == "-" else ("*", "^")
        b = applied(inverse, b, Fraction(-1))
    if op == "^" and {type(a), type(b)} == {Fraction} and b.denominator == 1:
        if abs(b) * max(map(int.bit_length, a.as_integer_ratio())) <= 4096:
            return a ** b
    trees = [*operands(op, a), *operands(op, b)]
    if op in FOLDS:
        number = Fraction(FOLDS[op](tree for tree in trees if isinstance(tree, Fraction)))
        others = sorted((tree for tree in trees if not isinstance(tree, Fraction)), key=repr)
        # x + 0 and 1x are x.
        trees = others if others and number == FOLDS[op](()) else [number, *others]
    return (op, *trees) if len(trees) > 1 else trees[0]


# What an answer says.
#   value   a Fraction; a tree of tuples for a formula, a list or a set; (":", text) if it is JOINED; or a text
#   values  the value, and others that it may be understood as: 3 h as 3h, 50% as 1/2, and 1/9 as 1:9
#   steps   as in `value`
#   text    its plain spelling, without left side and unit
#   name    the left side, x or f(x)
#   unit    words of UNITS, sorted, with exponents, and / for per
#   choice  the b of B) 12
Reading = namedtuple("Reading", "value values steps text name unit choice")


@functools.lru_cache(maxsize=256)
def read(text):
    """Return the Reading of an answer."""
    if len(normalize("NFKC", text)) > 500:
        return Reading(text, {text}, set(), "", "", [], None)
    rest = text
    for pattern, replacement in CLEANING:
        rest = pattern.sub(replacement, rest)
    left = LEFT.match(rest)
    # x_{1} is x_1, and y is f(x). A word does not count: area = 5 is A = 5.
    name = re.sub(r"[ {}]|\\angle|^.*(?<![\\a-z])[a-z]{3}.*", "", left[2] or "").replace("f(x)", "y")
    rest = rest[left.end():]
    bare = UNIT.sub(r"\1", rest)
    unit = sorted(UNITS[word] for word in re.findall(r"\w+|/", rest[len(bare):]) if word in UNITS)
    tree, steps = value(re.sub("[, ]", "", bare) if THOUSANDS.fullmatch(bare) else bare)
    values = {tree, value(rest)[0]}
    joined = JOINED.fullmatch(bare.replace(" ", ""))
    if joined:
        # 3:07 is 03:07, and 1,000-2,000 is 1000-2000.
        tree = ":", re.sub(r"(?<![\d.,])0+(?=\d)|,(?=\d{3})", "", joined[0])
        values = {tree}
    elif tree is None:
        tree = " ".join(TOKEN.findall(rest)).lower()
        values.add(tree)
    elif isinstance(tree, Fraction):
        values.add(("%", tree / 100 if "%" in rest else tree))
        if "." not in rest:
            values.add((":", str(tree).replace("/", ":")))
    return Reading(tree, values - {None, ""}, steps, bare, name, unit, left[1] and left[1].lower())


# ------------------------------------------------------------------------------------------------------------
# comparison


def comparison(given, truth):
    """Return whether an answer is the right one, or None if algebra could still show that it is.

    It is if the two are equal as exact values or formulas, or as text if one of them is no formula. Spaces,
    LaTeX's spellings and % do not count: 50% is 50 and 1/2, but 0.5% is 0.005. Nor does the order of terms,
    of factors, and of a list or a set, except between semicolons. A unit, a currency or a letter before =
    counts only if both answers have one. An answer with an operation between plain numbers that is still to
    be carried out, as in 2+2 or 18/3, is wrong, unless the truth has this operation. It never raises, and no
    input makes it slow.
    """
    answer = read(given)
    right = read(truth)
    # The last three are name, unit and choice.
    if any(mine and theirs and mine != theirs for mine, theirs in zip(answer[-3:], right[-3:])):
        return False
    # B) 12 is B.
    if answer.value == right.choice or right.value == answer.choice:
        return True
    if not answer.steps <= right.steps:
        return False
    if answer.values & right.values:
        return True
    # Algebra cannot make a formula a number, nor two numbers equal, nor numbers in a base or other brackets.
    kinds = {tree[0] for tree in (answer.value, right.value) if isinstance(tree, tuple)}
    kinds &= {"_", ":", *BRACKETS.values()}
    if isinstance(right.value, Fraction) or len(kinds) > 1 or kinds & {"_", ":"}:
        return False
    return None


def check_answer(text, truth, algebra=False):
    """Return whether a completion's final answer is the truth.

    truth: a text, which may be a worked solution, or a number. It may also be a list of these, or a list of
    texts as JSON, of which one is enough. A short line without a final answer is compared as a whole.
    algebra: whether to ask the package math-verify where exact values do not decide. Set a time limit for
    that.
    """
    marked = extract_answer(text)
    alone = len(text) <= 100 and not re.search("[=\n]", text.strip())
    answers = [marked or (text if alone else "")]
    if algebra and not marked:
        # The package looks for an answer in the last lines.
        tail = "\n".join(text.splitlines()[-10:])[-2000:]
        answers += [found for found in parsed(tail) if isinstance(found, str)]
    for answer, known in itertools.product(answers, alternatives(truth)):
        known = boxed_answer(known) or marked_answer(known) or known
        same = comparison(answer, known)
        if same or same is None and algebra and by_algebra(answer, known):
            return True
    return False


def alternatives(truth):
    # Returns the texts of which one is the right answer. ["4", "5"] are two, but [4, 5] is an interval.
    if isinstance(truth, str) and re.match(r'\[\s*"', truth):
        with contextlib.suppress(ValueError):
            truth = json.loads(truth)
    return [*map(str, truth if isinstance(truth, (list, tuple)) else [truth])]


# ------------------------------------------------------------------------------------------------------------
# algebra, by the package math-verify

def parsed(text):
    # Only those who use the package wait for this import.
    import math_verify
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The package's own time limits are off, because they use SIGALRM, which another library may be using.
    return math_verify.parse(text, parsing_timeout=None)


def by_algebra(given, truth):
    from math_verify import verify
    answer, right = [parsed(f"${read(text).text}$") for text in (given, truth)]
    # The default rounding would take 3.14159265 for pi.
    return verify(right, answer, float_rounding=30, timeout_seconds=None)
