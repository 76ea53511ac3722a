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
    ("答え|解答|正解|정답|답", "は|은|는"),
    ("respuesta|resposta|risposta|răspunsul|răspuns|opción correcta|réponse",
     "es|és|é|è|son|são|sono|este|est|sont|vaut"),
    ("antwort|antwoord|svaret|svar|vastaus|richtige option", "ist|lautet|är|er"),
    ("ответ|вариант|відповідь|отговор|odpowiedź|odpověď|odpoveď", "равен|это|є|е|je|jest|wynosi"),
    ("đáp án|đáp số|jawabannya|jawaban", "là|adalah|ialah"),
    ("cevap|yanıt|válasz|απάντηση", "az|είναι"),
    ("उत्तर|উত্তর|คำตอบ|الإجابة|الجواب|پاسخ|תשובה", "है|হল|হলো|คือ|هي|هو|برابر|היא"),
]
NOUN, VERB = ("|".join(column) for column in zip(*LANGUAGES))
# Not inside a Latin word
EDGE = "(?!(?<=[a-z])[a-z])"
# An answer begins behind these: `**Answer**: 18`, `"answer": 18`, `Answer - 18`, <answer>, a line that says
# only `Final Answer`, [[18]], and GSM8K's ####, unless the #### is a heading with text below it. If there are
# none of them, these count: `the answer in dollars is 18`, `the correct option would be: B`.
SIGNS = [re.compile(pattern, re.I | re.M) for pattern in [
    rf"(?:{NOUN})(?: (?:final|correct)\w?)?[\"'*_)`]*(?:】?\s*[:：=＝]|】|\s+(?:[-–—→]|->)\s)|"
    r"<(?:answer|solution|final_?answer)>|"
    rf"(?:(?<![^\n#*])|(?<=# )|(?<=final ))(?:{NOUN})(?: \w{{1,12}})?[* \t\r]{{0,9}}$|"
    r"\[\[(?=[^\[\]\n]{1,99}\]\])|"
    r"(?<!#)####(?!#)(?![ \t]*\**(?-i:[A-Z])[^\n]{0,80}\n\s{0,9}\S)",
    rf"(?:{NOUN}){EDGE}[^\n.:：。!?=<>]{{0,60}}?(?:{EDGE}(?:{VERB}){EDGE}"
    r"(?: (?:therefore|thus|then|simply|just|equal to|option|choice|la|a letra))*\s*[:：]?|[:：])"]]
MARK = re.compile(rf"{NOUN}|<answer>|<solution>|<final_?answer>|####|\[\[")
# What an answer stands between that begins so, behind a sign or below one; otherwise it ends with its line
CLOSING = {"<": "</", "[": "]]", "$$": "$$", r"\[": r"\]"}
# What leads to an answer in the last line, as in `So the total is 18`
LEADING = re.compile(
    rf"^.*{EDGE}(?:(?:result\w{{0,4}}|risultato|résultat|ergebnis|solution|total|value|so|thus|hence|"
    r"therefore)\b(?:.{0,60}\b(?:is|are|get|have|equals|es|est|ist|é|è)\b)?|(?:it|that)(?: i|['’]?)s|"
    "(?:i|we) get|donc|option(?: is)?|choice|choose|pick|also|итак|результат|结果[是为]?|因此|所以是?|等于|解|"
    rf"故?[应應]?[选選][项項择擇]?|故|kết quả là|よって|따라서|∴|⇒|=>){EDGE}[\s,:：*}}]*", re.I)
# What may follow an answer in its line: `18 because`, `18 is the answer`
TAIL = re.compile(
    rf"[ ,]?\(?{EDGE}(?:because|since|i hope|(?:is|as) (?:the )?(?:correct|right|final|answer|required)|是?正确|"
    rf"选项[。.]?$|因为|です|である|となり?ます?|になり?ます?|입니다|이다|이에요|예요|है|।){EDGE}.*", re.I)
# Behind a sign these follow as well: `18</s>`, `18. Next we ...`, but not `B. Paris`
REST = re.compile(rf"{TAIL.pattern}|</(?:s|think)>.*|<\|\w{{1,30}}\|>.*|[。！].*|"
                  r"(?<!^[a-z])(?<![. ][a-z])[.!][\"*)$]{0,4}\s+(?-i:[A-Z]).*", re.I | re.S)
# A number in a sentence: `She makes 18 dollars.`, but not `at least 18` or `the square root of 18`
SENTENCE = re.compile(r"^(?=.{,200}$)(?!.*\b(?:at|not|no|than|about|nearly|around|over|under|of|or|and|to|"
                      r"plus|minus|times|is|by)\b)(?:[^\W\d]+ [^\W\d]+ [^\d=\\]*?|[\u4e00-\u9fff]{2,}?)"
                      r"([$€£]?\d[^=\\]*)$", re.I)
# A box with brackets in it, up to eight levels deep, and \boxed 5. Boxes with only a comma or `and` between
# them, as in `\boxed{1} and \boxed{2}`, are one answer.
INSIDE = r"(?:[^{}\\]|\\.)*+"
for _ in range(8):
    INSIDE = rf"(?:[^{{}}\\]|\\.|\{{{INSIDE}\}})*+"
BOX = rf"\\(?:boxed|fbox)\s*+\{{(?!\s*\}})({INSIDE})\}}|\\boxed\s+([^\s{{}}$]+)"
BOXES = re.compile(rf"(?:{BOX})(?:[\s$]*+(?:,\s*+(?:and\b)?|and\b)[\s$]*+(?:{BOX}))*+", re.S | re.I)
# What a text may end with: **18**, `18`, $$18$$, \[18\], and $18$ or \(18\) in a line of its own
FRAMED = re.compile(r"(?:\*\*|`|\$\$|\\\[|\n\$|\n\\\()((?:(?!\*\*|`|\$\$|\\\[).)+)(?:\*\*|`+|\$\$?|\\[])])$",
                    re.S)
EDGES = " \t\r\n*`\"'“”"
# The words before an equation; `= 2*9 =` in `x = 2*9 = 18`, where no = is part of <= or =>; and `, y =` in
# `x = 1, y = 2`
BEFORE = re.compile(r"^[^=]*(?<![\\a-zA-Z])(?:[^\W\d_]{3,}|so|is|we|to|it)(?![^\W\d_])[\s,:：}]*")
CHAIN = re.compile(r"(?<![<>!=:])=(?:.*(?<![<>!=:])=)?(?![=>])")
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
    *_, last = "", *(boxes[0] for boxes in BOXES.finditer(text))
    contents = [box[1] or box[2] for box in re.finditer(BOX, last, re.S)]
    return ", ".join(dict.fromkeys(boxed_answer(each) or each.strip(EDGES) for each in contents))


def marked_answer(text):
    # Returns the answer behind the last sign. One of more than 100 characters may be the beginning of a
    # solution, so it counts only if there is no shorter one.
    longer = None
    # The last 500 words are enough, and keep this quick. İ is the letter that grows when it becomes small.
    words = [word.start() for word in MARK.finditer(text.replace("İ", "I").lower())][-500:]
    for signs in SIGNS:
        following = None
        for sign in filter(None, (signs.match(text, start) for start in reversed(words))):
            # The answer that a sign announces ends before the next sign.
            answer = announced(sign[0], text[sign.end():following].strip(EDGES))
            if 0 < len(answer) <= 100:
                return answer
            longer, following = longer or answer, sign.start()
    return longer


def announced(sign, below):
    # Returns the answer that a sign announces, from the text below the sign.
    closing = CLOSING.get(sign[0]) or CLOSING.get(below[:2], "\n")
    below = below.removeprefix("$$").removeprefix(r"\[").strip(EDGES)
    line = below.partition(closing if closing in below else "\n")[0]
    # {"answer": 18}
    if '"' in sign or "'" in sign:
        line = re.split(r"[\"']|[,}]\s*$", line)[0]
    # `Answer: The answer is 18`
    line = REST.sub("", line[max((sign.end() for sign in SIGNS[1].finditer(line[:300])), default=0):])
    return SENTENCE.sub(r"\1", line).strip(EDGES).removesuffix("*.").strip(EDGES)


def last_answer(text):
    # Returns the answer that a text ends with.
    text = text.strip().rstrip(".。．! ")
    framed = FRAMED.search(text[-1000:])
    before, _, line = (framed[1].strip(EDGES) if framed else text).rpartition("\n")
    if len(line) > 300 or ASSUMPTION.match(line):
        return None
    rest = LEADING.sub("", TAIL.sub("", line)).strip(EDGES)
    if CHAIN.search(rest):
        # `So x = 2*9 = 18` is x = 18, and `Total = 2*9 = 18` is = 18.
        rest = BEFORE.sub("", rest)
        return rest if SEVERAL.search(rest) else CHAIN.sub("=", rest)
    alone = rest != line.strip(EDGES) or not before or before.rstrip(EDGES).endswith((":", "："))
    tree = value(plain(rest)) if alone else None
    formula = isinstance(tree, Fraction) or tree is not None and not WORDY.search(rest)
    return rest if formula or framed and len(rest) <= 100 else None


# ------------------------------------------------------------------------------------------------------------
# cleaning: what does not count is removed, and spellings of the same thing become one

# Each sign, and its other spellings.
SYMBOLS = {
    "*": r"\times \cdot \ast × · ⋅ ∙", "^": "**", "/": r"\div ÷ ⁄", "-": "− – —", ":": r"∶ \colon",
    "<": r"\lt", ">": r"\gt", r"\le": r"\leq \leqslant ≤ ⩽ <=", r"\ge": r"\geq \geqslant ≥ ⩾ >=",
    r"\ne": r"\neq ≠ !=", "|": r"\mid \vert \lvert \rvert ∣", r"\frac": r"\dfrac \tfrac \cfrac",
    r"\binom": r"\dbinom \tbinom", r"\pi": "π", r"\sqrt": "√", r"\theta": "θ", r"\infty": r"∞ \inf \infinity",
    r"\cup": r"∪ \bigcup", r"\cap": "∩", r"\in": "∈", r"\pm": "±", r"\emptyset": r"\varnothing ∅",
    r"\matrix(": r"\begin{matrix} \begin{pmatrix} \begin{bmatrix}", "mi/h": "mph", "km/h": "kph",
    ")": r"\end{matrix} \end{pmatrix} \end{bmatrix} \end{array}", " ": r"\, \; \: \quad \qquad ~",
    "": r"\left \right \big \bigl \bigr \bigg \biggl \biggr \displaystyle \! \( \) \[ \] \$ $ £ € ¥ ₹ \% % "
        r"\degree °"}
SPELLINGS = {each: sign + " " * ("\\" in sign) for sign, names in SYMBOLS.items() for each in names.split()}
# NFKC makes full-width signs plain, but it would make 1½, x², a₁ and ①② the numbers 11/2, x2, a1 and 12. The
# last row removes characters without width.
FORMS = [("[¼-¾⅐-⅞]", " {}"), ("[²³¹⁰⁴-⁹⁺⁻]+", "^{{{}}}"), ("[₀-₉]+", "_{{{}}}"), ("[①-⑳]", "({})"),
         ("、", ","), ("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]", "")]
CLEANING = [(re.compile(pattern), replacement) for pattern, replacement in [
    # A one-letter unit is written upright. In 5\text{ m}, m becomes uprightm: a plain m may be a variable.
    (r"((?:[\d}]|\\pi)(?:[\s~]|\\[,;: ])*)\\(?:text|mathrm)\s*\{[\s~]*([acghj-nstvw])\}", r"\1 upright\2"),
    # \text{cm}, \mathbf{x}
    (r"\\(?:text\w*|math(?:rm|bf|bb|it|sf|tt)|mbox|underline|emph|operatorname|boldsymbol)\*?\s*"
     r"\{([^{}]*)\}", r" \1 "),
    # \begin{array}{cc}, and the \\[2pt] and the \\ (here ;) that end rows of a matrix
    (r"\\begin\{array\}\{[lcr|]*\}", r"\\begin{matrix}"), (r";\s*\[[\d.]+(?:pt|em|ex|mm)\]", ";"),
    (r";\s*(?=\\end)", ""),
    # 11{,}111 and 11,\! 111
    (r"(?<=\d)(?:\{,\}|(?:\\[!,;:]\s*)?,(?:\\[!,;:]\s*)+|(?:\\[!,;:]\s*),)(?=\d{3}(?!\d))", ","),
    # 90^\circ and 90\circ, but not f\circ g
    (r"\^\s*\{?\s*\\circ\s*\}?|(?<=\d)\s*\\circ(?![a-z])", ""),
    # sin and infinity for \sin and \infinity
    (r"(?<![a-z\\])(pi|sqrt|sin|cos|tan|log|ln|inf(?:inity)?)(?![a-z])", r"\\\1 "),
    ("|".join(re.escape(each) + "(?![a-z])" * each[-1].isalpha()
              for each in sorted(SPELLINGS, key=len, reverse=True)), lambda found: SPELLINGS[found[0]]),
    # \sin x is \sin(x), but \sin 2x may be \sin(2x).
    (r"\\(sin|cos|tan|log|ln)\s*(?:(\d+|[a-z]|\\pi|\\theta)(?=\s*(?:[-+,)}]|$))|\{(\w+)\})",
     r"\\\1(\2\3)"),
    # 5 x 10^3, (1, 2] U [3, 4), \{x: x>3\}, and 1:9
    (r"(?<=\d)\s*x\s*(?=10\^)", "*"), (r"(?<=[)\]])\s*u\s*(?=[(\[])", r"\\cup "),
    (r"(\\\{\s*[a-z]\s*):", r"\1|"), (r"^\s*(\d+)\s*:\s*(\d+)\s*$", r"\1/\2"),
    # 1 1/2
    (r"(?<![\d./])(\d+)\s+(\d+)/(\d+)(?![\d./])", r"\1\\frac{\2}{\3}"),
    # 3, 5, and 7; but not x < 1 or x > 2, nor with words: odd and even
    (r"(?<=[\w}).])\s*,?\s*(?:\b(?:and|or)\b|[和或])\s*(?!.*(?:[<>]|\\[lgn]e |(?<![\\a-z])[a-z]{3}))", ", "),
    # Option B, and 9 (apples)
    (r"^\s*(?:option|choice|选项?)\s*(?=\(?[a-j]\b)", ""), (r"(?<=\d)\s*\(([a-z ]{3,})\)\s*$", r" \1")]]
# Several choices or statements: BC, B and C, or (1)(3); and what may surround them, as in \text{BC}
CHOICES = re.compile(r"\s*(?:(?:\(?[A-J]\)?(?:[\s,;]|and)*){2,}|(?:\(\d\)(?:[\s,;]|and)*){2,})")
FONT = re.compile(r"\\(?:text|math|mbox)\w*|[{}$\\]")
# A left side such as x =, f(x) =, or x \in; but x=1, y=2 stays as it is
LEFT = re.compile(r"\s*(?:(\\?[a-z][\w ]*(?:(?<=_)\{\w+})?)(\([a-z]\))?\s*(?:=(?!.*[,;].*=)|\\in\b)|=)")


def compatible(text):
    # Returns the text with plain signs and digits: 18 for full-width １８ and for Arabic ones.
    if text.isascii() or len(text) > 500:
        return text
    for pattern, form in FORMS:
        text = re.sub(pattern, lambda run, form=form: form.format(normalize("NFKC", run[0])), text)
    return re.sub(r"\d", lambda digit: str(int(digit[0])), normalize("NFKC", text))


def plain(text):
    """Return the text without currencies, %, capitals, a leading `x =`, a last period and LaTeX's spaces."""
    return parts(text)[0]


def cleaned(text):
    # Returns the text in small letters, in the spellings that `value` reads.
    letters = FONT.sub("", text)
    if CHOICES.fullmatch(letters):
        text = ", ".join(sorted({*re.findall(r"[A-J\d]", letters)}))
    text = text.replace("\\\\", ";" if r"\begin" in text else "\\").replace("&", ",").replace("\\ ", " ")
    # \Delta has to stay different from \delta.
    text = re.sub(r"\\(?!Big)([A-Z])", r"\\upper\1", text).lower()
    for pattern, replacement in CLEANING:
        text = pattern.sub(replacement, text)
    text = text.strip().strip('"“”')
    return text if text.endswith("..") else text.rstrip(" .,;。")


# ------------------------------------------------------------------------------------------------------------
# reading: the value of an answer. Numbers become one exact fraction, and where there are letters, brackets or
# roots, tuples (operator, left, right) keep the formula.

# The names of each unit. Two answers with different units from this table are never equal.
UNITS = {name: names.split()[0] for names in (
    "mm millimeter millimetre 毫米|cm centimeter centimetre 厘米|dm|m meter metre 米|km kilometer kilometre 千米|nm|"
    "in inch inche|ft foot feet|yd yard|mi mile|mg milligram|g gram 克|kg kilogram 千克|lb pound|oz ounce|"
    "ml milliliter millilitre 毫升|l liter litre 升|qt|pt|cc|s sec second 秒|min minute 分钟|h hr hour 小时|day 天|"
    "week 周|month 月|yr year 年|ms|ns|am|pm|hz|khz|mhz|ghz|kw|mw|pa|kpa|j|kj|mj|ev|kev|mev|kb|mb|gb|tb|"
    "/ per|2 square sq|3 cubic").split("|") for word in names.split() for name in (word + "s", word)}
# Other words after a number are units as well, up to three of them, but not these, which are part of the
# value. A word of two letters or without a vowel may be a product of variables, such as kT.
OPERATOR = ("or|and|not|plus|minus|times|over|mod|choose|less|more|squared|cubed|dozen|hundred|thousand|"
            "hal(?:f|ves)|quarters|(?:four|fif|six|seven|eigh|nin|ten|[a-z]+(?:ie|teen|red|sand))ths?|thirds|"
            "lakh|crore|gross|score|factorial|root|radical|to|out|through|versus|below|negative|at|modulo|"
            "[mbtr]+illion|[abcnxyz]{2,3}")
EXPONENT = r"(?:\s*\^[({]?[23][)}]?)?"
NAME = rf"(?!(?:{OPERATOR})\b)(?:(?=[a-z]*[aeiouy])[a-z]{{3,}}|[cmk]m|kg|ml|ft|yd|sq){EXPONENT}"
WORD = rf"(?:{NAME}|(?:{'|'.join(filter(str.isalpha, UNITS))}){EXPONENT})(?![a-z])"
# In 12元 and 5厘米 the unit is written without a space, but 7万 is 70,000, and 7以上 is 7 or more.
COUNTER = ("(?:(?!мил|млн|тыс|[万萬亿億兆百十割折半之倍多余以未和或만억천백십이미]|千(?![克米瓦]))"
           "[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af\u0400-\u04ff]){1,10}")
# A unit of any kind follows a number: 5 m; only a name follows a formula: 2\sqrt{3} cm, 12\pi cm.
NAMES = rf"\s+{NAME}(?:[ /]{WORD}){{0,2}}$"
UNIT = re.compile(rf"^([^a-z]*\d)\s+{WORD}(?:[ /]{WORD}){{0,2}}$|(?<=[\d)}}]){NAMES}|(?<=\\pi){NAMES}|"
                  rf"(?<=[\d)}}])\s*{COUNTER}$|(?<=\d)(?:[cmk]m|kg|ml){EXPONENT}$")
# 1,234.5 or 1 234.5
THOUSANDS = re.compile(r"[-+]? ?[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?")
# A digit of \frac12, a number such as 5, .5 or 1.2e5, a command such as \pi, or a character
TOKEN = re.compile(r"(?:(?<=\\frac)|(?<=\\frac ))\d|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3}(?!\d|\s*_))?|"
                   r"\\[a-z]+|\\.|\S")
# Operators by how tightly they bind; the last one, between a and b in `ab`, is a product.
LEVELS = [[";"], [","], ["=", "<", ">", r"\le", r"\ge", r"\ne", r"\in"], [r"\cup", r"\cap", r"\setminus"],
          ["+", "-", r"\pm", r"\mp"], ["*", "/", ""], ["^"], ["_"]]
PRECEDENCE = {op: level for level, ops in enumerate(LEVELS, 1) for op in ops}
SUM, ATOM = PRECEDENCE["+"], len(LEVELS)
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "": operator.mul,
              "/": operator.truediv, "^": operator.pow, "=": lambda left, right: right}
# Pairs of brackets, and how the tree names them; those without a name count only around a list: (1, 2)
BRACKETS = {"()": "", "{}": "", r"\{\}": "", "[]": "[]", "[)": "[)", "(]": "(]", r"\of)": "of"}
ENDS = ["", ")", "]", "}", r"\}"]


def value(text):
    """Return the exact value of plain text like -3, 1,234, 0.5, 1 1/2, 5 cm or 2*(3+4)^2 as a Fraction.

    For other formulas this is a tree of nested tuples, which keeps the order of the terms, but not the order
    of a list 2, 1 or a set; for a text that is no formula it is None.
    """
    # This limits the depth of the recursion as well.
    if len(text) > 300:
        return None
    bare = UNIT.sub(r"\1", text)
    tree = tree_of(re.sub("[, ]", "", bare) if THOUSANDS.fullmatch(bare) else bare)
    # In `x + 3 boxes`, boxes may be no unit.
    return tree if isinstance(tree, Fraction) or not re.search(r"(?<![\\a-z])[a-z]", bare) else tree_of(text)


def tree_of(text):
    # 1 \pm x is the list 1+x, 1-x.
    if text.count(r"\pm") == 1 and not re.search("[,;(]", text):
        text = text.replace(r"\pm", "+") + "," + text.replace(r"\pm", "-")
    tokens = ["", *reversed(TOKEN.findall(text))]

    def parse(level):
        # Reads an operand, and goes on as long as the operators bind more tightly than the level.
        token, op = tokens.pop(), None
        if token in LEVELS[SUM - 1]:
            tree = parse(max(level, SUM))
            tree = tree if token == "+" else negative(tree) if token == "-" else (token, tree)
        elif token in ("(", "[", "{", r"\of", r"\{"):
            tree, end = parse(0), tokens.pop()
            name = BRACKETS[token + end]
            if name or isinstance(tree, tuple) and tree[0] in (",", ";"):
                tree = name or token.strip("\\"), unordered(tree) if end[-1] == "}" else tree
        elif token in ENDS or token in PRECEDENCE:
            raise ValueError("no operand")
        elif token == r"\frac":
            tree = applied("/", parse(ATOM), parse(ATOM))
        elif token == r"\sqrt":
            tree = token, parse(ATOM) if tokens[-1] == "[" else 2, parse(ATOM)
        else:
            tree = Fraction(token) if re.match(r"\.?\d", token) else token
            if token.isdigit() and tokens[-1] == r"\frac":
                # 1\frac12 is 1 + 1/2.
                part = parse(ATOM)
                mixed = isinstance(part, Fraction) and 0 < part < 1
                tree = applied("+" if mixed else "", tree, part)
        while level < ATOM and tokens[-1] not in ENDS:
            # 3*4! is 3*(4!).
            if tokens[-1] in ("!", "'"):
                tree = tokens.pop(), tree
                continue
            before, op = op, tokens[-1] if tokens[-1] in PRECEDENCE else ""
            if PRECEDENCE[op] <= level:
                break
            if op:
                tokens.pop()
            elif before == "/" or isinstance(tree, Fraction) and re.match(r"\.?\d", tokens[-1]):
                raise ValueError("1/2x may be x/2, and 2 3 may be 23")
            elif tokens[-1] == "(" and not isinstance(tree, Fraction):
                # f(x)^2 is not f(x^2).
                tokens[-1] = r"\of"
            tree = applied(op, tree, parse(PRECEDENCE[op] - (op == "^")))
        return tree

    with contextlib.suppress(ValueError, KeyError, ZeroDivisionError, RecursionError):
        tree = unordered(parse(0))
        return tree if tokens == [""] else None


def applied(op, a, b):
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        size = max(a.numerator.bit_length(), a.denominator.bit_length())
        if op in OPERATIONS and (op != "^" or b.denominator == 1 and abs(b) * size <= 4096):
            return OPERATIONS[op](a, b)
    # a, b, c is one tuple.
    return (*a, b) if op == "," and isinstance(a, tuple) and a[0] == op else (op or "*", a, b)


def negative(tree):
    if isinstance(tree, Fraction):
        return -tree
    # The sign of a product goes to its first factor.
    return (tree[0], negative(tree[1]), tree[2]) if tree[0] in ("*", "/") else ("-", tree)


def unordered(tree):
    # Returns a list a, b, c in an order that does not depend on how it was written. a; b keeps its order.
    return (",", *sorted(tree[1:], key=repr)) if isinstance(tree, tuple) and tree[0] == "," else tree


# ------------------------------------------------------------------------------------------------------------
# comparison

# This is a choice with its text, such as B) 12 or (B) 12, but not (A) and (B).
CHOICE = re.compile(rf"^(?:\(([a-j])\)|([a-j])[).:,])(?:\s*(?!(?:{OPERATOR}|[a-j])\b)"
                    r"(?!.*\b[a-j]\))(?:[\w{\[\"-]|\\(?:frac|sqrt|pi|\{)).*)?$", re.S)
# $5 or 5 dollars, 5 euros, £5, 5 cents
CURRENCY = re.compile(r"(\\\$|^[^$]*\$[^$]*$|\bdollars?\b|美元)|(€|\beuros?\b|欧元)|(£)|(¢|\bcents?\b)", re.I)
# Words, which are no variables: \text{cm}, \Delta, Yes; and letters whose capitals count: m, and both a and A
WORDS = re.compile(r"\\(?:text|math)\w*\s*\{[^{}]*\}|\\[a-zA-Z]+|\b[A-Z]?[a-z]{2,}\b|[^a-zA-Z]")
CASED = re.compile("[k-zK-Z]|[a-z].*[A-Z]|[A-Z].*[a-z]")


def parts(text):
    # Returns the plain text, and what two equal answers may leave out, but not say differently: a currency, a
    # left side x or f(x), and a unit, as a sorted list of units, exponents, and / for per.
    text = compatible(text)
    # A longer text is no answer, and some of the patterns take quadratic time.
    if len(text) > 500:
        return text, []
    rest = cleaned(text)
    currency, left = CURRENCY.search(text), LEFT.match(rest)
    name, of = left.groups("") if left else ("", "")
    # x_{1} is x_1. A word does not count: area = 5 is A = 5.
    name = re.sub(r"[ {}]|\\angle|^.*(?<![\\a-z])[a-z]{3}.*", "", name)
    rest = rest[left.end():] if left else rest
    # In `cm in total`, cm is the unit. \text{J}, which is uprightj here, is one as well.
    words = re.findall(r"[a-z]+|[/23]|[^\x00-\x7f]+", rest[len(UNIT.sub(r"\1", rest)):].partition(" in ")[0])
    unit = sorted(filter(None, (UNITS.get(word.removeprefix("upright"), word * ("upright" in word))
                                for word in words)))
    currency, unit = currency and currency.lastindex, {*unit} - {*"/23"} and unit
    return rest, [currency, of and name + of, not of and name, unit]


def comparison(given, truth):
    """Return whether two answers are the same, or None if algebra could still show that they are.

    They are the same if they are equal as exact values or formulas, or as text if one of them is no formula.
    Spaces, LaTeX's spellings, currencies and % do not count: 50% is 50, but 0.5% is not 0.5. Nor does the
    order of a list or a set, except between semicolons. A unit or a letter before = counts only if both
    answers have one, and capitals count only if a formula or the two answers have both m and M. It never
    raises, and no input makes it slow.
    """
    (one, said), (other, known) = parts(given), parts(truth)
    if any(mine and theirs and mine != theirs for mine, theirs in zip(said, known)):
        return False
    percent = len({bool(re.search("[%％]|percent", each)) for each in (given, truth)}) > 1
    letters, others = (WORDS.sub("", each[:500]) for each in (given, truth))
    if letters != others and letters.lower() == others.lower() and CASED.search(f"{letters}\n{others}"):
        return None
    # B) 12 is B, and the other way round.
    if re.search(r"[A-JＡ-Ｊ]", truth) and any(re.fullmatch(r"\(?[a-j]\)?", each) for each in (one, other)):
        one, other = CHOICE.sub(r"\1\2", one), CHOICE.sub(r"\1\2", other)
    trees = value(one), value(other)
    if None in trees:
        # Spaces count only between digits: 1 2 is not 12.
        bare = [re.sub(r"(?<!\d) | (?!\d)", "", " ".join(each.split())) for each in (one, other)]
        return bare[0] == bare[1] != "" or None
    numbers = all(isinstance(tree, Fraction) for tree in trees)
    if trees[0] == trees[1] and not (percent and numbers and 0 < abs(trees[0]) < 1):
        return True
    # 3 h is 3h, whether h is a unit or a variable.
    if not numbers and tree_of(one) == tree_of(other) is not None:
        return True
    # Algebra cannot make two numbers equal, except 50% and 0.5, nor numbers in a base, different brackets, or
    # a number and a list.
    base = [tree[0] == "_" and isinstance(tree[1], Fraction) for tree in trees if isinstance(tree, tuple)]
    kinds = {isinstance(tree, Fraction) or tree[0] for tree in trees}
    kinds &= {True, ",", "(", "{", *BRACKETS.values()}
    return False if any(base) or len(kinds) > 1 and kinds != {",", "{"} or numbers and not percent else None


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
