r"""Answers: which final answer a completion gives, and whether it is the right one.

    extract_answer  finds the final answer in a text: in a \boxed{}, behind `Answer:`, or at the end
    comparison      says whether two answers are the same, as exact values or as text
    check_answer    says whether a completion's final answer is the right one
"""
import contextlib
import logging
import operator
import re
from fractions import Fraction
from unicodedata import normalize

# ------------------------------------------------------------------------------------------------------------
# extraction: where an answer stands

# A line per language, or for related ones: words for `answer`, and words for `is`. Add a line for yours.
LANGUAGES = [
    (r"answer|ans(?<![a-z]ans)|(?:correct|right|best) (?:option|choice)", "is|are|equals|would be"),
    ("答案|答|正确选项", "是|为|為|应[是为]|應[是為]|等于"),
    ("答え|解答|正解", "は"),
    ("정답|답", "은|는"),
    ("respuesta|resposta|risposta|răspunsul|răspuns|opción correcta", "es|és|é|è|são|son|sono|este"),
    ("réponse", "est|sont|vaut"),
    ("antwort|antwoord|svaret|svar|vastaus|richtige option", "ist|lautet|är|er"),
    ("ответ|вариант|відповідь|отговор|odpowiedź|odpověď|odpoveď", "равен|это|є|е|je|jest|wynosi"),
    ("đáp án|đáp số|jawabannya|jawaban", "là|adalah|ialah"),
    ("cevap|yanıt|válasz|απάντηση", "az|είναι"),
    ("उत्तर|উত্তর|คำตอบ", "है|হল|হলো|คือ"),
    ("الإجابة|الجواب|پاسخ|תשובה", "هي|هو|برابر|היא"),
]
# Not inside a Latin word
EDGE = "(?!(?<=[a-z])[a-z])"
FILLER = "(?: (?:therefore|thus|then|simply|just|equal to|option|choice|la|a letra))*"
# What leads to an answer in the last line (`So the total is 18`), and what may follow an answer in its line.
LEAD = (r"(?:result\w{0,4}|risultato|résultat|ergebnis|solution|total|value|so|thus|hence|therefore)\b"
        r"(?:.{0,60}\b(?:is|are|get|have|equals|es|est|ist|é|è)\b)?|(?:it|that)(?: i|['’]?)s|(?:i|we) get|"
        "option(?: is)?|choice|choose|pick|donc|also|итак|результат|结果[是为]?|故?[应應]?[选選][项項择擇]?|因此|所以是?|等于|故|"
        "解|kết quả là|よって|따라서|∴|⇒|=>")
TAIL = (rf"[ ,]?\(?{EDGE}(?:because|since|i hope|(?:is|as) (?:the )?(?:correct|right|final|answer|required)|"
        f"选项[。.]?$|是?正确|因为|です|である|となり?ます?|になり?ます?|입니다|이다|이에요|예요|है|।){EDGE}.*")
NOUN, VERB = ("|".join(column) for column in zip(*LANGUAGES))
# An answer begins behind these: `**Answer**: 18`, `"answer": 18`, `Answer - 18`, <answer>, a line that says
# only `Final Answer`, [[18]], and GSM8K's ####, unless the #### is a heading with text below it. If there are
# none of them, these count: `the answer in dollars is 18`, `the correct option would be: B`.
SIGNS = [re.compile(pattern, re.I | re.M) for pattern in [
    rf"(?:{NOUN})(?: (?:final|correct)\w?)?[\"'*_)`]*(?:】?\s*[:：=＝]|】|\s+(?:[-–—→]|->)\s)|"
    r"<(?:answer|solution|final_?answer)>|"
    rf"(?:(?<![^\n#*])|(?<=# )|(?<=final ))(?:{NOUN})(?: \w{{1,12}})?[* \t\r]{{0,9}}$|"
    r"\[\[(?=[^\[\]\n]{1,99}\]\])|"
    r"(?<!#)####(?!#)(?![ \t]*\**(?-i:[A-Z])[^\n]{0,80}\n\s{0,9}\S)",
    rf"(?:{NOUN}){EDGE}[^\n.:：。!?=<>]{{0,60}}?(?:{EDGE}(?:{VERB}){EDGE}{FILLER}\s*[:：]?|[:：])"]]
MARK = re.compile(rf"{NOUN}|<answer>|<solution>|<final_?answer>|####|\[\[")
# This ends an answer in its line: `18 because`, `18</s>`, `18. Next we ...`, but not `B. Paris`.
REST = re.compile(rf"{TAIL}|</(?:s|think)>.*|<\|\w{{1,30}}\|>.*|[。！].*|"
                  r"(?<!^[a-z])(?<![. ][a-z])[.!][\"*)$]{0,4}\s+(?-i:[A-Z]).*", re.I | re.S)
LEADING = re.compile(rf"^.*{EDGE}(?:{LEAD}){EDGE}[\s,:：*]*", re.I)
# A number in a sentence: `She makes 18 dollars.`, but not `at least 18` or `the square root of 18`
SENTENCE = re.compile(r"(?!.*\b(?:at|not|no|than|about|nearly|around|over|under|of|or|and|to|plus|minus|"
                      r"times|is|by)\b)(?:[^\W\d]+ [^\W\d]+ [^\d=\\]*?|[\u4e00-\u9fff]{2,}?)"
                      r"([$€£]?\d[^=\\]*)$", re.I)
# \boxed{, \boxed 5, an escaped sign such as \{, or a bracket; if only JOINT stands between two boxes, as in
# `\boxed{1} and \boxed{2}`, they are one answer.
BRACKETS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\boxed\s+([^\s{}$]+)|\\.|[{}]")
JOINT = re.compile(r"\}[\s$]*(?:,|,?\s*and\b)[\s$]*\\(?:boxed|fbox)\s*\{", re.I)
# What may stand around the last thing of a text
FRAMES = [("```", "```"), ("**", "**"), ("$$", "$$"), (r"\[", r"\]"), ("`", "`"), ("\n$", "$"),
          ("\n\\(", r"\)")]
EDGES = " \t\r\n*`\"'“”"
# The sign of an equation, and not a part of <=; the words before an equation; x = 1, y as in `x = 1, y = 2`
EQUALS = re.compile(r"(?<![<>!=:])=(?![=>])")
BEFORE = re.compile(r".*(?<![\\a-zA-Z])(?:[^\W\d_]{3,}|so|is|we|to|it)(?![^\W\d_])[\s,:：]*")
SEVERAL = re.compile(r"(?:[,;，；]|\band|\bor)\s*[$\\]*[a-zA-Z]\w*\s*(?:=|$)")
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
    # Returns the content of the last box, or of several that are one answer.
    opened, boxes, found = [], [], []
    for sign in BRACKETS.finditer(text) if "box" in text else []:
        if sign[0] == "}" and opened and (start := opened.pop())[0] != "{":
            boxes.append((start.end(), sign.start()))
        elif sign[1]:
            boxes.append(sign.span(1))
        elif sign[0][-1] == "{" and sign[0] != r"\{":
            opened.append(sign)
    for start, end in sorted(boxes, reverse=True):
        if found and not JOINT.fullmatch(text[end:after][:40]):
            break
        if box := text[start:end].strip(EDGES):
            found, after = found if [box] == found[-1:] else [*found, box], start
    return ", ".join(reversed(found))


def marked_answer(text):
    # Returns the answer behind the last sign. One of more than 100 characters may be the beginning of a
    # solution, so it counts only if there is no shorter one.
    found, low = [], text.lower()
    # Few letters grow when they become small. The last 500 words are enough, and keep this quick.
    words = [word.start() for word in MARK.finditer(low if len(low) == len(text) else text)][-500:]
    for signs in SIGNS:
        following = None
        for sign in filter(None, (signs.match(text, start) for start in reversed(words))):
            # The answer that a sign announces ends before the next sign.
            found += filter(None, [announced(sign[0], text[sign.end():following].strip(EDGES))])
            if found and len(found[-1]) <= 100:
                return found[-1]
            following = sign.start()
    return found[0] if found else None


def announced(sign, below):
    # Returns the answer that a sign announces, from the text below the sign.
    closing = {"[": "]]", "<": "</"}.get(sign[0])
    if closing and closing in below:
        below = below.partition(closing)[0].strip(EDGES)
        return SIGNS[1].split(below)[-1].strip(EDGES) if len(below) <= 100 else below
    opening = next(each for each in ("$$", r"\[", "") if below.startswith(each))
    line = below[len(opening):].partition({"$$": "$$", r"\[": r"\]", "": "\n"}[opening])[0]
    # {"answer": 18}
    if '"' in sign or "'" in sign:
        line = re.split(r"[\"']|[,}]\s*$", line)[0]
    # `Answer: The answer is 18`
    line = REST.sub("", line[max((sign.end() for sign in SIGNS[1].finditer(line[:300])), default=0):])
    sentence = SENTENCE.match(line) if len(line) <= 200 else None
    return (sentence[1] if sentence else line).strip(EDGES).removesuffix("*.").strip(EDGES)


def last_answer(text):
    # Returns the answer that a text ends with.
    text, framed = text.strip().rstrip(".。．! "), False
    for opening, closing in FRAMES:
        _, opened, inside = text.removesuffix(closing).rpartition(opening)
        if opened and text.endswith(closing):
            text, framed = inside.strip(EDGES), True
    before, _, line = text.rpartition("\n")
    if len(line) > 300 or ASSUMPTION.match(line):
        return None
    rest = LEADING.sub("", re.sub(TAIL, "", line, flags=re.I)).strip(EDGES)
    left, *sides = EQUALS.split(rest)
    if sides:
        # `Total = 2*9 = 18` is 18, and `So x = 2*9 = 18` is x = 18.
        left = BEFORE.sub("", left)
        sides = sides if SEVERAL.search("=".join(sides)) else sides[-1:]
        return "=".join([left] * bool(re.search(r"(?<![\\a-zA-Z])[a-zA-Z]", left)) + sides).strip(EDGES)
    if framed and len(rest) <= 100:
        return rest
    alone = rest != line.strip(EDGES) or not before or before.rstrip(EDGES).endswith((":", "："))
    tree = value(plain(rest)) if alone else None
    if isinstance(tree, Fraction) or isinstance(tree, tuple) and not WORDY.search(rest):
        return rest
    return rest if alone and re.fullmatch(r"\(?[A-Z][).]?", rest) else None


# ------------------------------------------------------------------------------------------------------------
# cleaning: what does not count is removed, and spellings of the same thing become one

# Each sign, and its other spellings.
SYMBOLS = {
    "*": r"\times \cdot \ast × · ⋅ ∙", "^": "**", "/": r"\div ÷ ⁄", "-": "− – —", ":": r"∶ \colon",
    "<": r"\lt", ">": r"\gt", r"\le": r"\leq \leqslant ≤ ⩽ <=", r"\ge": r"\geq \geqslant ≥ ⩾ >=",
    r"\ne": r"\neq ≠ !=", "|": r"\mid \vert \lvert \rvert ∣", r"\frac": r"\dfrac \tfrac \cfrac",
    r"\binom": r"\dbinom \tbinom", r"\pi": "π", r"\sqrt": "√", r"\theta": "θ", r"\infty": "∞",
    r"\cup": r"∪ \bigcup", r"\cap": "∩", r"\in": "∈", r"\pm": "±", r"\emptyset": r"\varnothing ∅",
    " ": r"\, \; \: \quad \qquad ~", "": r"\left \right \big \bigl \bigr \bigg \biggl \biggr \displaystyle "
                                         r"\! \( \) \[ \] \$ $ £ € ¥ ₹ \% % \degree °"}
SPELLINGS = {each: sign + " " * sign.startswith("\\")
             for sign, names in SYMBOLS.items() for each in names.split()}
# NFKC makes full-width signs plain, but it would make 1½, x², a₁ and ①② the numbers 11/2, x2, a1 and 12. The
# last row removes characters without width.
FORMS = [("[¼-¾⅐-⅞]", " {}"), ("[²³¹⁰⁴-⁹⁺⁻]+", "^{{{}}}"), ("[₀-₉]+", "_{{{}}}"), ("[①-⑳]", "({})"),
         ("、", ","), ("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]", "")]
CLEANING = [(re.compile(pattern), replacement) for pattern, replacement in [
    # These are one-letter units, which are written upright. m becomes unitm: a plain m may be a variable.
    (r"(?:(?<=[\d}])|(?<=\\pi))(?:[\s~]|\\[,;: ])*\\(?:text\s*\{\s*|mathrm\s*\{~)([acghjklmnstvw])\}",
     r" unit\1"),
    # \text{cm} and \mathbf{x}; a matrix as \matrix(1,2;3,4)
    (r"\\(?:text\w*|math(?:rm|bf|bb|it|sf|tt)|mbox|underline|emph|operatorname|boldsymbol)\*?\s*"
     r"\{([^{}]*)\}", r" \1 "),
    (r"\\begin\{[pb]?matrix\}|\\begin\{array\}\{[lcr|]*\}", r"\\matrix("),
    (r";\s*\[[\d.]+(?:pt|em|ex|mm)\]", ";"), (r";?\s*\\end\{(?:[pb]?matrix|array)\}", ")"),
    # 11{,}111 and 11,\! 111
    (r"(?<=\d)(?:\{,\}|(?:\\[!,;:]\s*)?,(?:\\[!,;:]\s*)+|(?:\\[!,;:]\s*),)(?=\d{3}(?!\d))", ","),
    # 90^\circ and 90\circ, but not f\circ g
    (r"\^\s*\{?\s*\\circ\s*\}?|(?<=\d)\s*\\circ(?![a-z])", ""),
    ("|".join(re.escape(each) + "(?![a-z])" * each[-1].isalpha()
              for each in sorted(SPELLINGS, key=len, reverse=True)), lambda found: SPELLINGS[found[0]]),
    (r"\\ ", " "),
    # 5 x 10^3, and (1, 2] U [3, 4)
    (r"(?<=\d)\s*x\s*(?=10\^)", "*"), (r"(?<=[)\]])\s*u\s*(?=[(\[])", r"\\cup "),
    # 1:9, and 3, 5, and 7; but not x < 1 or x > 2
    (r"^\s*(\d+)\s*:\s*(\d+)\s*$", r"\1/\2"),
    (r"(?<=[\w}).])\s*,?\s*(?:\b(?:and|or)\b|[和或])\s*"
     r"(?=(?:\\(?![lgn]e )[a-z]+|[a-z]{1,2}(?![a-z])|[^<>a-z])*$)", ", "),
    # Option B, 9 (apples), and \{x: x>3\}
    (r"^\s*(?:option|choice|选项?)\s*(?=\(?[a-j]\b)", ""), (r"(?<=\d)\s*\(([a-z ]{3,})\)\s*$", r" \1"),
    (r"(\\\{\s*[a-z]\s*):", r"\1|"),
    # \frac12 and \frac{1}2
    (r"\\frac\s*(\d)", r"\\frac{\1}"), (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    # infinity, sqrt, and \sin x as \sin(x)
    (r"(?<![a-z\\])inf(?:inity)?(?![a-z])", r"\\infty "),
    (r"(?<![a-z\\])(pi|sqrt|sin|cos|tan|log|ln)(?![a-z])", r"\\\1 "),
    (r"\\(sin|cos|tan|log|ln)\s*(?:(\d+|[a-z]|\\pi|\\theta)(?=\s*(?:[-+,)}=]|$))|\{(\w+)\})",
     r"\\\1(\2\3)"),
    # This is a left side. The lookahead keeps it where other equations follow: x=1, y=2.
    (r"^\s*(?:\\?[a-z][\w ]*(?:(?<=_)\{\w+\})?(?:\([a-z]\))?\s*(?:=(?!.*[,;].*=)|\\in(?![a-z]))|=)", "")]]


def compatible(text):
    # Returns the text with plain signs and digits: 18 for full-width １８ and for Arabic ones.
    if text.isascii() or len(text) > 500:
        return text
    for pattern, form in FORMS:
        text = re.sub(pattern, lambda run, form=form: form.format(normalize("NFKC", run[0])), text)
    return re.sub(r"\d", lambda digit: str(int(digit[0])), normalize("NFKC", text))


def plain(text):
    """Return the text without currencies, %, capitals, a leading `x =`, a last period and LaTeX's spaces."""
    text = compatible(text)
    # A longer text is no answer, and some of the patterns take quadratic time.
    if len(text) > 500:
        return text
    text = text.replace("\\\\", ";" if r"\begin" in text else "\\").replace("&", ",")
    # \Delta has to stay different from \delta.
    text = re.sub(r"\\(?!Big)([A-Z])", r"\\upper\1", text).lower()
    for pattern, replacement in CLEANING:
        text = pattern.sub(replacement, text)
    text = text.strip().strip('"“”')
    return text if text.endswith("..") else text.rstrip(" .,;。")


# ------------------------------------------------------------------------------------------------------------
# reading: the value of an answer. Numbers become one exact fraction, and where there are letters, brackets or
# roots, tuples (operator, left, right) keep the formula.

# A unit is up to three words after a number, or a metric symbol right behind it. The words of OPERATOR are no
# units but part of the value. A word of two letters or without a vowel may be a product of variables, such as
# kT.
OPERATOR = ("or|and|not|plus|minus|times|over|mod|choose|less|more|squared|cubed|dozen|hundred|thousand|"
            "hal(?:f|ves)|quarters|(?:four|fif|six|seven|eigh|nin|ten|[a-z]+(?:ie|teen|red|sand))ths?|thirds|"
            "lakh|crore|gross|score|factorial|root|radical|to|out|through|versus|below|negative|at|modulo|"
            "[mbtr]+illion|[abcnxyz]{2,3}")
EXPONENT = r"(?:\s*\^[({]?[23][)}]?)?"
NAME = rf"(?!(?:{OPERATOR})\b)(?:(?=[a-z]*[aeiouy])[a-z]{{3,}}|[cmk]m|kg|ml|ft|yd|sq){EXPONENT}"
WORD = (rf"(?:{NAME}|(?:[mglsh]|[dn]m|mg|in|mi|lbs?|oz|hrs?|yr|m?s|mph|kph|[kmg]?hz|[km]w|k?pa|[km]?j|"
        rf"[km]?ev|[kmgt]b|qt|pt|cc|pm|am|ms|ns){EXPONENT})(?![a-z])")
# In 12元 and 5厘米 the unit is written without a space, but 7万 is 70,000, and 7以上 is 7 or more.
COUNTER = ("(?:(?!мил|млн|тыс|[万萬亿億兆百十割折半之倍多余以未和或만억천백십이미]|千(?![克米瓦]))"
           "[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af\u0400-\u04ff]){1,10}")
UNIT = re.compile(rf"(?:(?<=\d)\s+{WORD}|(?:(?<=[)}}])|(?<=\\pi))\s+{NAME})(?:[ /]{WORD}){{0,2}}$|"
                  rf"(?<=[\d)}}])\s*{COUNTER}$|(?<=[\d)}}])(?:[cmk]m|kg|ml){EXPONENT}$")
# A unit may follow these values, which are not exact: 2\sqrt{3} or 12\pi.
ROOTS = re.compile(r"(?:[\d\s.+*/^(){}-]|\\(?:frac|sqrt|pi)(?![a-z]))*")
NAMED = re.compile(rf"\s*(?:{NAME}(?:[ /]{WORD}){{0,2}}|{COUNTER})")
# 1,234.5 or 1 234.5, and 1 1/2
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?")
MIXED = re.compile(r"([-+]?)\s*(\d+)\s+(\d+)/(\d+)")
# A number such as 5, .5 or 1.2e5, a command such as \pi, or a character
TOKEN = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3}(?!\d|\s*_))?|\\[a-z]+|\\.|\S")
# Operators by how tightly they bind; the last one, between a and b in `ab`, is a product.
LEVELS = [[";"], [","], ["=", "<", ">", r"\le", r"\ge", r"\ne", r"\in"], [r"\cup", r"\cap", r"\setminus"],
          ["+", "-", r"\pm", r"\mp"], ["*", "/", ""], ["^"], ["_"]]
PRECEDENCE = {op: level for level, ops in enumerate(LEVELS, 1) for op in ops}
SUM, ATOM = PRECEDENCE["+"], len(LEVELS)
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
              "^": operator.pow}
CLOSING = {"(": [")", "]"], "[": [")", "]"], r"\of": [")"], "{": ["}"], r"\{": [r"\}"]}
ENDS = ["", ")", "]", "}", r"\}"]


def value(text):
    """Return the exact value of plain text like -3, 1,234, 0.5, 1 1/2, 5 cm or 2*(3+4)^2 as a Fraction.

    For other formulas this is a tree of nested tuples, which keeps the order of the terms, but not the order
    of a list 2, 1 or a set; for a text that is no formula it is None.
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
    # 1 \pm x is the list 1+x, 1-x.
    if text.count(r"\pm") == 1 and not re.search("[,;(]", text):
        text = text.replace(r"\pm", "+") + "," + text.replace(r"\pm", "-")
    tokens = ["", *reversed(TOKEN.findall(text))]

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
        if token in LEVELS[SUM - 1]:
            tree = parse(max(level, SUM))
            return tree if token == "+" else negative(tree) if token == "-" else (token, tree)
        if token in CLOSING:
            tree, end = parse(0), tokens.pop()
            if end not in CLOSING[token]:
                raise ValueError("unbalanced brackets")
            listed = isinstance(tree, tuple) and tree[0] in (",", ";")
            if token + end in ("()", "{}") and not listed:
                return tree
            return token.strip("\\"), unordered(tree) if end[-1] == "}" else tree, end.strip("\\")
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
        tree = unordered(parse(0))
        return tree if tokens == [""] else None


def applied(op, a, b):
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        if not op:
            raise ValueError("2 3 may be 6 or 23")
        size = max(a.numerator.bit_length(), a.denominator.bit_length())
        if op in OPERATIONS and (op != "^" or b.denominator == 1 and abs(b) * size <= 4096):
            return OPERATIONS[op](a, b)
    return op or "*", a, b


def negative(tree):
    if isinstance(tree, Fraction):
        return -tree
    # The sign of a product goes to its first factor.
    return (tree[0], negative(tree[1]), tree[2]) if tree[0] in ("*", "/") else ("-", tree)


def unordered(tree):
    # Returns a list a, b, c in an order that does not depend on how it was written. a; b keeps its order.
    items = []
    while isinstance(tree, tuple) and tree[0] == ",":
        tree, item = tree[1:]
        items.append(item)
    return (",", *sorted([*items, tree], key=repr)) if items else tree


# ------------------------------------------------------------------------------------------------------------
# comparison

# This is a choice with its text, such as B) 12 or (B) 12, but not (A) and (B).
CHOICE = re.compile(rf"^(?:\(([a-j])\)|([a-j])[).:,])(?:\s*(?!(?:{OPERATOR}|[a-j])\b)"
                    r"(?!.*\b[a-j]\))(?:[\w{\[\"-]|\\(?:frac|sqrt|pi|\{)).*)?$", re.S)
# Several choices or statements: BC, B and C, or (1)(3)
CHOICES = re.compile(r"(?:\(?[A-J]\)?(?:[\s,;]|and)*){2,}|(?:\(\d\)(?:[\s,;]|and)*){2,}")
# B or (B); \Delta, or another capital; what surrounds choices, as in \text{BC}; and what is no variable
LETTER = re.compile(r"\(?[a-j]\)?")
CAPITAL = re.compile(r"(\\[a-zA-Z]+)|([A-Z])")
FONT = re.compile(r"\\(?:text|math|mbox)\w*|[{}$\\]")
WORDS = re.compile(r"\\(?:text|math)\w*\s*\{[^{}]*\}|\\[a-zA-Z]+|\b[A-Z]?[a-z]{2,}\b")
# Two answers with different left sides of these kinds differ: x, x_1, xy, \cos x, and f(x). Words do not
# count: area = 5 is A = 5.
LEFT = [re.compile(r"[\s$]*((?:\\[a-zA-Z]+|(?<![a-zA-Z])[a-zA-Z]{1,2}(?![a-zA-Z])|[A-Z]{3}|_\w|_\{\w+\}|\s)+)"
                   r"=[^=]*$"), re.compile(r"[\s$]*([a-zA-Z]\([a-zA-Z]\))\s*=[^=]*$")]
# Each text holds the names of one unit. Two answers with different units from this table are never equal.
UNITS = {name: names.split()[0] for names in [
    "mm millimeter millimetre 毫米", "cm centimeter centimetre 厘米", "m meter metre 米", "yd yard", "mi mile",
    "km kilometer kilometre 千米", "in inch inche", "ft foot feet", "mg milligram", "g gram 克",
    "l liter litre 升", "kg kilogram 千克", "ml milliliter millilitre 毫升", "s sec second 秒", "min minute 分钟",
    "h hr hour 小时", "day 天", "week 周", "month 月", "yr year 年", "/ per", "2 square sq", "3 cubic"]
    for name in names.split()}
CURRENCIES = [re.compile(pattern, re.I) for pattern in [
    r"\\\$|^[^$]*\$[^$]*$|\bdollars?\b|美元", r"€|\beuros?\b|欧元", "£", r"¢|\bcents?\b"]]


def comparison(given, truth):
    """Return whether two answers are the same, or None if algebra could still show that they are.

    They are the same if they are equal as exact values or formulas, or as text if one of them is no formula.
    Spaces, LaTeX's spellings, currencies and % do not count: 50% is 50, but 0.5% is not 0.5. Nor does the
    order of a list or a set, except between semicolons. A unit or a letter before = counts only if both
    answers have one, and capitals count only if a formula or the two answers have both m and M. It never
    raises, and no input makes it slow.
    """
    given, truth = compatible(given), compatible(truth)
    short = given[:500], truth[:500]
    chosen = [set(re.findall(r"[A-J\d]", each)) if CHOICES.fullmatch(FONT.sub("", each).strip()) else set()
              for each in short]
    # (1)(3) is no product.
    if all(chosen) or any(set("123456789") & each for each in chosen):
        return chosen[0] == chosen[1]
    percent = len({bool(re.search("%|percent", each)) for each in (given, truth)}) > 1
    differ = any(len({"".join(re.findall(r"\\(?!angle)[a-zA-Z]+|\w|[()]", match[1]))
                      for each in short if (match := left.match(each))}) > 1 for left in LEFT)
    money = [{sign for sign in CURRENCIES if sign.search(each)} for each in short]
    if both_cases(*short):
        given, truth = (CAPITAL.sub(lambda sign: sign[1] or rf"\upper{sign[2]} ", each)
                        for each in (given, truth))
    pair = plain(given), plain(truth)
    # B) 12 is B, and the other way round.
    lettered = re.search(r"[A-J]", truth) and any(map(LETTER.fullmatch, pair))
    given, truth = (CHOICE.sub(r"\1\2", each) if lettered else each for each in pair)
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
    brackets = {tree[0] + tree[2] for tree in formulas if tree[0] in CLOSING}
    decided = (numbers and not percent) or in_base or len(brackets) > 1
    return False if decided else None


def both_cases(given, truth):
    # Returns whether a formula, or the two together, have the same letter as a capital and as a small one.
    # Words do not count, nor does b for the choice B.
    one, other = (set(WORDS.sub("", each)) for each in (given, truth))
    both = {letter for letter in one | other if letter.upper() > "J"}
    return any(letter.swapcase() in letters for letters in (one, other, both) for letter in letters
               if letter.isalpha())


def unit(text):
    # Returns what is known of the text's unit, or None: a sorted list of units, exponents, and / for per.
    found = UNIT.search(text) if len(text) <= 300 else None
    # In `cm in total`, cm is the unit. \text{J}, which is unitj here, is one as well.
    words = re.findall(r"[a-z]+|[/23]|[^\x00-\x7f]+",
                       found[0].partition(" in ")[0].replace("mph", "mi/h")) if found else []
    known = [UNITS.get(word.removeprefix("unit"), UNITS.get(word.rstrip("s"), word if "unit" in word else ""))
             for word in words]
    return tuple(sorted(filter(None, known))) if {*known} - {*"/23", ""} else None


def squeezed(text):
    # Removes spaces, except between digits: 1 2 is not 12.
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(text.split()))


def check_answer(text, truth, algebra=False):
    """Return whether a completion's final answer is the truth.

    truth: a text, which may be a worked solution, or a list of texts, of which one is enough. A short
    line without a final answer is compared as a whole. algebra: whether to ask the package
    math-verify where exact values do not decide. Set a time limit for that.
    """
    given, alone = extract_answer(text), len(text) <= 100 and not re.search("[=\n]", text.strip())
    whole = text if given is None and alone else given
    for one in truth if isinstance(truth, (list, tuple)) else [truth]:
        one = boxed_answer(one) or marked_answer(one) or one
        same = None if whole is None else comparison(whole, one)
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
