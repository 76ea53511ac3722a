r"""Answers: which final answer a completion gives, and whether it is the right one.

    extract_answer  finds the final answer in a text: in a \boxed{}, behind `Answer:`, or at the end
    read            gives the exact value of an answer, which is the same for all its spellings
    comparison      says whether an answer is the right one, if exact values decide that
    check_answer    says whether a completion's final answer is the right one
    final_answer    gives the final answer in a text in a form in which answers that agree are equal
"""
import contextlib
import functools
import json
import logging
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from unicodedata import normalize

# ------------------------------------------------------------------------------------------------------------
# extraction: where an answer stands. Names in capitals are regular expressions, which `re` keeps compiled.

# A line has the words of a language, or of several related ones, for `answer`, for `is`, and for `so`, as
# regular expressions. Add a line for your language.
LANGUAGES = [
    ("answer|ans|(?:correct|best) (?:option|choice)", r"is|are|equals|\w{1,9} be",
     "so|thus|hence|therefore|results?|value|number|(?:i|we) get|(?:it|that).?i?s|option|choice|choose|pick"),
    ("答案|答|正确选项", "是|为|為|应[是为]|應[是為]|等于",
     "结果[是为]?|因此|所以是?|等于|解|故?[应應]?[选選][项項择擇]?|故"),
    ("答え|解答|正解|정답|답", "は|은|는", "よって|따라서"),
    ("respuesta|resposta|risposta|răspuns|opción correcta|réponse", "es|é|è|son|são|sono|este|est|sont|vaut",
     "resultado|risultato|résultat|solution|total|donc"),
    ("antwort|antwoord|lösung|svaret|svar|vastaus|richtige option", "ist|lautet|är|er", "ergebnis|also"),
    ("ответ|вариант|відповідь|отговор|odpowiedź|odpověď", "равен|это|є|е|je|jest|wynosi", "итак|результат"),
    ("cevap|đáp (?:án|số)|jawaban(?:nya)?|yanıt|válasz|απάντηση", "là|(?:ad|i)alah|az|είναι", "kết quả là"),
    ("उत्तर|উত্তর|คำตอบ|الإجابة|الجواب|پاسخ|תשובה", "है|হলো?|คือ|هي|هو|برابر|היא", "∴|⇒|=>")]
NOUN, VERB, SO = map("|".join, zip(*LANGUAGES))
# A thought ends with </think>, Magistral's [/THINK], Gemma's <channel|>, Cohere's <|END_THINKING|> and more.
# Each message of gpt-oss begins with <|message|>, and the last one is the answer.
THOUGHT_END = r"""(?ix)(?: </(?:seed:|longcat_)?(?:think(?:ing)?|thought|reasoning)> | \[/THINK\] | ◁/think▷ |
    <channel\|> | <\|message\|> | <\|end_(?:of_)?(?:thinking|thought)\|> |
    <\|inner_suffix\|> )(?:\s*<\|\w+\|>)*"""
# EDGE matches any place except one inside a Latin word.
EDGE = "(?!(?<=[a-z])[a-z])"
# An answer begins behind a sign: `**Answer**: 18`, `"answer": 18`, `Answer - 18`, <answer>, a line that says
# only `Final Answer`, [[18]], and GSM8K's ####, unless that is a heading with text below it.
SIGN = (
    rf"(?im)(?:{NOUN})[\"'*_)`]*(?:】?\s*[:：=＝]|】|\s+(?:[-–—→]|->)\s)|"
    r"(?=<(?:solution|(?:final_?)?answer)>)|"
    rf"(?:(?<![^\n#*])|(?<=# )|(?<=final ))(?:{NOUN})(?: \w{{1,12}})?[* \t\r]{{0,9}}$|"
    r"\[\[(?=[^\[\]\n]{1,99}\]\])|(?<!#)####(?!#)(?![ \t]*\**[a-z][^\n]{0,80}\n\s{0,9}\S)")
# A weak sign counts if there are no others: `the answer in dollars is 18`, `the answer would be: B`.
WEAK_SIGN = (
    rf"(?im)(?:{NOUN}){EDGE}[^\n.:：。!?=<>]{{0,60}}?(?:{EDGE}(?:{VERB}){EDGE}"
    rf"(?: (?:therefore|thus|then|simply|just|equal to|option|choice|la|a letra){EDGE})*\s*[:：]?|[:：])")
# The last line may begin with words that lead to its answer: `So the total is 18`, `Janet makes 9*2 = 18`.
LEADING = (rf"(?i)^(?:.*{EDGE}(?:{SO})(?:\b.{{0,60}}\b(?:{VERB}|get|have)\b)?{EDGE}[\s,:：*}}]*)?"
           r"(?:[^=]*(?<![\\a-zA-Z])(?:[^\W\d_]{3,}|is|we|to|it)(?![^\W\d_])[\s,:：}]*(?=[^=]*=))?")
# An answer ends before these words in its line: `18 because`, `18 is the answer`, `18</s>`, `18 ✅`.
TAIL = (rf"(?is)(?:[ ,]?\(?{EDGE}(?:because|since|i hope|(?:is|as) (?:the )?(?:correct|right|final|"
        rf"answer|required)|是?正确|选项[。.]?$|因为|です|である|[とに]なりま|입니다|이다|है|।){EDGE}|</|<\||(?<=\w)\W*[✅✔✓☑]).*")
# An answer also ends where its text does in {"answer": "18", "why": "9*2"}, and where its sentence does, but
# `B.` in `B. Paris` is no sentence, nor is `St.` in `St. Louis`.
STOP = (r"\"\s*[,}]|,\s*\"|[。！]|(?<!^[a-zA-Z])(?<![. ][a-zA-Z])(?<!\b(?:St|Mr|Ms|Dr|Mt|Ft|Lt))"
        r"(?<!\b(?:Mrs|Sta|Rev|Gen|Col|Sgt|Gov|Sen|Rep))(?<!\b(?:Prof|Capt))[.!][\"*)$]{0,4}\s+(?=[A-Z])")
# These words change a number: 18 is no answer in `at least 18`, `the square root of 18` and `18 thousand`.
OPERATOR = (r"(?:or|and|not|no|never|cannot|\w+n't|without|than|about|around|over|under|below|of|from|to|by|"
            r"at|plus|minus|times|twice|double|triple|half|halves|thirds|"
            r"root|out|squared|cubed|factorial|dozen|hundred|thousand|\w+illion|(?!mon)\w*[defghnrx]ths?)\b")
# A sentence may end with its answer: `She makes 18 dollars.`
SUBJECT = rf"(?i)^(?!.*\b{OPERATOR})(?:[^\W\d]+[.,]? [^\W\d][^\d=\\]* |[一-鿿]{{2,}})"
SENTENCE = SUBJECT + r"([-*$€£]*\d[^=\\]*)$"
# A box may hold brackets in brackets, eight levels deep. It may also be \boxed 5, but `in \boxed format` and
# \boxed{your answer} only speak of boxes. The first group is the comma or the `and` that joins a box to the
# box before it.
INSIDE = r"(?:[^{}\\]|\\.|\{" * 8 + "[^{}]*+" + r"\})*+" * 8
BOX = (r"(?s)([\s$]{0,9}+(?:,\s{0,9}+(?:and\b)?|and\b)[\s$]{0,9}+)?"
       r"\\(?:(?:boxed|fbox)\s*+\{(?!\s*(?:(?:your |the |final )*answer|\.{3}|…|\\[lc]?dots)?\s*\})"
       rf"({INSIDE})\}}|boxed\s+((?![a-zA-Z]{{2}})[^\s{{}}$]+))")
# A line of nothing but these only opens or closes a frame. Brackets, arrows and emoji may be an answer.
NO_ANSWER = r"(?:\\[\[(]|[\s*`$\"'“”_#:.。…-])*"
# The answer ends before a bracket that it has not opened, as in {"answer": 18} and [[18]].
UNOPENED = rf"^(?:({INSIDE})\}}|([^][]*)\]\]).*"
# A text may end with a frame: **18**, `18`, $$18$$, \[18\], and $18$ or \(18\) in a line by itself.
FRAMED = r"(?s)(?:\*\*|`|\$\$|\\\[|\n\$|\n\\\()((?:(?!\*\*|`|\$\$|\\\[).)+)(?:[*`$]+|\\[])])$"
EDGES = " \t\r\n*`\"'“”"
# A chain of equations is shortened: `= 2*9 =` in `x = 2*9 = 18` becomes =. No = here is part of <= or =>.
CHAIN = r"(?<![<>!=:])=(?![=>])(?:(?:(?!\b(?:and|or)\b|[,;，；]\D).)*(?<![<>!=:])=(?![=>]))?"
# A line such as `Let x = 5` or `Step 2` has no answer. A text with a word, or with a sign that no formula
# has, is wordy.
ASSUMPTION = (r"(?i)\W*(?:let|suppose|assume|if|when|where|step|first|next|set|say|try)\b|"
              "设|若|假设")
WORDY = r"(?<![\\a-zA-Z])[^\W\d_]{3,}|#|^\{"


def extract_answer(text):
    r"""Return the final answer in a text, or None if it has none.

    It is in the last \boxed{}, whatever comes after that. Without a box it is behind the last SIGN or
    WEAK_SIGN, and without these it is what the text ends with: an equation, something bold or fenced, or a
    line with nothing but an answer. What stands before the last THOUGHT_END counts only if there is no answer
    after it.
    """
    *thoughts, reply = re.split(THOUGHT_END, text)
    if thoughts:
        answer = extract_answer(reply)
        if answer:
            return answer
    return boxed_answer(text) or marked_answer(text) or last_answer(text)


def boxed_answer(text):
    # Returns the content of the last box, or of several that are joined: `\boxed{1} and \boxed{2}`.
    answers = []
    end = 0
    for box in re.finditer(BOX, text[-100_000:]):
        joint, braced, bare = box.groups()
        if not joint or box.start() > end:
            answers = []
        answer = (braced or bare).strip(" \t\r\n*`")
        # Quotation marks go in pairs: f' keeps its mark.
        answers.append(re.sub(r"(?s)^(['\"“])(.*)['\"”]$", r"\2", answer))
        end = box.end()
    if answers:
        return boxed_answer(answers[-1]) or ", ".join(dict.fromkeys(answers))


def marked_answer(text):
    # Returns the answer behind the last sign. A longer text is no answer but the beginning of a solution.
    # The last 10,000 characters are enough, and keep this quick.
    for sign in (SIGN, WEAK_SIGN):
        parts = re.split(sign, text[-10_000:])
        for part in reversed(parts[1:]):
            answer = announced(part)
            if 0 < len(answer) <= 100:
                return answer


def announced(part):
    # Returns the answer at the beginning of a part, which is the text between a sign and the next one. The
    # answer is a line, and in <answer> it may be several.
    lines = re.findall(r"(?s)^<\w+>(.*?)</", part)
    lines += re.sub(r"^<\w+>", "", part).split("\n")
    line = next((line for line in lines if not re.fullmatch(NO_ANSWER, line)), "").strip(EDGES)
    # `Answer: The answer is 18`
    line = marked_answer(line[:300]) or line
    line, *_ = re.split(STOP, line, maxsplit=1)
    line = re.sub(UNOPENED, r"\1\2", re.sub(TAIL, "", line))
    return re.sub(SENTENCE, r"\1", line).strip(EDGES).removesuffix("*.").strip(EDGES)


def last_answer(text):
    # Returns the answer that a text ends with.
    text = text.strip()
    sentence = text.rstrip(".。．! ")
    framed = re.search(FRAMED, sentence[-1000:])
    content = framed[1].strip(EDGES) if framed else sentence
    line = content.rpartition("\n")[2]
    answer = re.sub(LEADING, "", re.sub(TAIL, "", line[-300:]))
    answer = re.sub(CHAIN, "=", answer).strip(EDGES)
    if not answer or len(line) > 300 or re.match(ASSUMPTION, line):
        return None
    if re.search(CHAIN, answer) or framed and len(answer) <= 100 or is_formula(answer):
        return answer
    # `So he has 7 apples left.` A sentence without a full stop may have been cut off.
    measured = re.match(MEASURED, re.split(STOP, line)[-1])
    if measured and sentence != text:
        return measured[1]


def right_answer(text):
    # Returns the answer in the text of a row. If this is a worked solution, its answer is found as in a
    # completion. Without such an answer a solution of eight words or more has the only number in its last
    # sentence as its answer.
    answer = boxed_answer(text) or marked_answer(text)
    if not answer and re.match(SOLUTION, text):
        only = re.match(ONLY_NUMBER, text[-1000:].strip())
        answer = last_answer(text) or only and only[1]
    return answer or text


def is_formula(text):
    # Returns whether a text is a formula and nothing else. B) 12 may be the last of the choices.
    reading = read(text)
    if reading.choice:
        return False
    # The value of a text that is no formula is its tokens, with spaces between them.
    return isinstance(reading.value, Fraction) or not (" " in reading.value or re.search(WORDY, text))


# ------------------------------------------------------------------------------------------------------------
# spellings: signs and notations that mean the same become one

FUNCTIONS = "sqrt sin cos tan arcsin arccos arctan log ln".split()
# Others are functions only with their backslash, because 5 sec is a time, and a hat may be an answer.
COMMANDS = r"\sec \csc \cot \sinh \cosh \tanh \exp \vec \hat \bar".split()
COMMANDS += [rf"\{name}" for name in FUNCTIONS]
# A sign has other spellings, which stand behind it. 3/4 may be a fraction, but 3÷4 is none.
SPELLINGS = {
    "*": r"\times \cdot \ast × · ⋅ ∙",
    "*1/": r"\div ÷",
    "/": "⁄",
    "^": "**",
    "-": "− – — ‐",
    r"\pm ": "±",
    "%": r"\% percent",
    ":": r"∶ \colon",
    "<": r"\lt",
    ">": r"\gt",
    r"\le ": r"\leq \leqslant ≤ ⩽ <=",
    r"\ge ": r"\geq \geqslant ≥ ⩾ >=",
    r"\ne ": r"\neq ≠ !=",
    "|": r"\mid \vert \lvert \rvert ∣",
    r"\frac ": r"\dfrac \tfrac \cfrac \nicefrac",
    r"\binom ": r"\dbinom \tbinom",
    r"\sqrt ": "√ sqrt",
    r"\infty ": "∞ infinity inf",
    r"\pi ": "π pi",
    r"\theta ": "θ",
    r"\in ": "∈",
    r"\cap ": "∩",
    r"\cup ": r"∪ \bigcup",
    r"\emptyset ": r"\varnothing ∅",
    "mi/h": "mph",
    "km/h": "kph",
    ",": "、 &",
    " ": r"\, \; \: \quad \qquad ~",
    "": r"\! \( \) \[ \] \$ $ £ € ¥ ₹ \degree ° \displaystyle \bf \bm \large"}
# SIGNS gives the sign for each spelling. A function without its backslash also has one.
SIGNS = {name: rf"\{name} " for name in FUNCTIONS}
for sign, spellings in SPELLINGS.items():
    SIGNS |= dict.fromkeys(spellings.split(), sign)


def sign_of(match):
    # Returns the sign that has this spelling.
    return SIGNS.get(match[0], match[0])


def compatible(match):
    # Returns full-width and other variants of signs as plain signs.
    return normalize("NFKC", match[0])


def lower(match):
    # Returns a word without capitals.
    return match[0].lower()


def choices(match):
    # Returns (B), or B and C, as b, or b, c.
    return ", ".join(re.findall(r"[A-J\d]", match[2])).lower()


def improper(match):
    # Returns 1\frac12 as \frac{3}{2}.
    whole, top, bottom = [int(digits.strip("{}")) for digits in match.groups() if digits]
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


def decimal(match):
    # Returns 1.5*10^3 as 1500, and 10^3 as 1000.
    return format(Decimal(f"{match[1] or 1}e{match[2] or match[3]}"), "f")


# An amount of money follows its sign.
AMOUNT = r"\s*([-+]?[\d.,]*\d)\.?\s*$"
# The text on the right, or what the function returns, replaces what the pattern matches, in this order.
CLEANING = {
    # \frac{ 1 }{ 2 } is \frac{1}{2}.
    r"(?<=\{)\s+|\s+(?=\})": "",
    # NFKC makes full-width signs plain, but it would make 1½, x², a₁ and ①② the numbers 11/2, x2, a1 and 12.
    "[¼-¾⅐-⅞]": r" \g<0>",
    "[²³¹⁰⁴-⁹⁺⁻]+": r"^{\g<0>}",
    "[₀-₉]+": r"_{\g<0>}",
    "[①-⑳]": r"(\g<0>)",
    # Characters without width go.
    "[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]": "",
    r"[\s\S]+": compatible,
    # A matrix becomes (1,2;3,4). Elsewhere \\ is \
    r"\\\\(?:\[\w+\])?(?=[\s\S]*\\end)": ";",
    r"\\\\": r"\\",
    r"\\ ": " ",
    r"\\begin ?\{(?:[pb]?matrix|array)\}(\{[lcr|]*\})?": "(",
    r";?\s*\\end ?\{(?:[pb]?matrix|array)\}": ")",
    # 11{,}111 and 11,\! 111 are 11,111.
    r"(?<=\d)(?:\{,\}|,?(?:\\[!,;:]\s*)+,?)(?=\d{3}(?!\d))": ",",
    # 90^\circ and 90\circ are 90, but f\circ g is not fg. Behind such a sign C and F are units, cc and ff.
    r"(?:\^\s*\{?\s*\\circ\s*\}?|(?<=\d)\s*\\circ(?![a-z])|°)"
    r"(?:\s*([CF])\b|\s*\\(?:text|mathrm)\s*\{\s*([CF])\s*\})?": r" \1\1\2\2",
    r"^\s*([-+]?[\d.,]+)\s*([CF])\s*$": r"\1 \2\2",
    # Colours, sizes and rupees go.
    r"\\(?:(?:text)?color\s*\{\w+\}|(?:left|right|[bB]ig+[lr]?)\b)|^\s*[Rr]s\b\.?(?=\s*\d)": "",
    # \$5 and -$5 are amounts, but $5$ is not; €5 and 5€ are the same.
    rf"^\s*([-+]?)\s*(?:US)?(?:\\\$|\$(?=[^$]*$)){AMOUNT}": r"\1\2 dollar",
    rf"^\s*([-+]?)\s*£{AMOUNT}": r"\1\2 sterling",
    rf"^\s*([-+]?)\s*€{AMOUNT}": r"\1\2 euro",
    r"(?<=\d)\s*€\W*$": " euro",
    r"\\[a-zA-Z]+|\\.|\*\*|[<>!]=|[a-zA-Z]+|[^\w\s]|[πθ]": sign_of,
    # An upright N after a number is a unit, here nn. A plain N may be a variable.
    r"((?:[\d}]|\\pi)\s*)\\(?:text|mathrm)\s*\{\s*([JNWVKCFTHA])\s*\}": r"\1 \2\2",
    # \text{cm} is cm, and \mathbf{x} is x.
    r"\\(?:text\w*|math[a-z]{2}|mbox|underline|emph|operatorname|boldsymbol)\*?\s*\{([^{}]*)\}": r" \1 ",
    # An answer may be choices or statements: B, (B), BC, B and C, (1)(3). CAFE and B A B are neither.
    r"^(?!.*([A-J]).*\1)(?=[^A-J]*+(?:[A-J]{2}|A?B?C?D?E?F?G?H?I?J?)(?![A-J]))"
    r"\W*(?:(?i:option|choice)|选项?)?\s*((?:\(?[A-J]\)?(?:[\s.,;:*`\"{}]|and)*)+|"
    r"(?:\(\d\)(?:[\s,;]|and)*){2,})$": choices,
    # 3:07pm and 3 p.m. are times.
    r"(?i)(?:(?<=:\d\d)\s*am|(?<=\d)\s*a\.\s?m\.?)\W*$": " am",
    r"(?i)(?:(?<=:\d\d)\s*pm|(?<=\d)\s*p\.\s?m\.?)\W*$": " pm",
    # Words have no capitals, but m and M are different, and so are kT and KT.
    r"(?<![a-zA-Z\\])(?:[A-Z]?[a-z]{2,}|[A-Z]{2,}|No)(?![a-zA-Z])": lower,
    # 0.5% is 0.005, but 50% is 50.
    r"(?<!\d)(0?\.\d+)\s*%": r"\1e-2",
    # \{x: x>3\} is \{x| x>3\}, and (1, 2] U [3, 4) is a union.
    r"(\\\{ ?[a-z] ?):": r"\1|",
    r"(?<=[)\]]) ?U ?(?=[(\[])": r"\\cup ",
    # Scientific notation is one number, and so are 1 1/2 and 1\frac12.
    r"(?<![\d.^_])(?:(\d+\.?\d*|\.\d+)\s*[*x]\s*)?10\s*\^\s*"
    r"(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3})(?!\.?\d))(?!\s*[\^!])": decimal,
    r"(?<![\d./^])(\d+)\s*(?:\\frac\s*(\d|\{\d+\})\s*(\d|\{\d+\})|(?<=\s)(\d+)/(\d+)(?![\d./]))": improper,
    # 3, 5, and 7 is a list; but x < 1 or x > 2 is none, nor are words: odd and even.
    r"(?<=[\w}).])\s*,?\s*(?:\b(?:and|or)\b|[和或])\s*(?!.*(?:[<>]|\\[lgn]e |(?<![\\a-z])[a-z]{3}))": ", ",
    # 9 (apples) is 9 apples.
    r"(?<=\d)\s*\(([a-zA-Z ]{3,})\)\s*$": r" \1",
    # Quotation marks go, and so does a last period.
    r"^[\s\"“”*`]+|(?<![.\s])\s*\.?[\s,;。\"“”*`]*$": ""}


# ------------------------------------------------------------------------------------------------------------
# reading: the value of an answer. Numbers become one exact fraction, and where there are letters, brackets or
# roots, tuples (operator, left, right) keep the formula.

# A unit has several names, and each name has a plural with s. Two answers with different units from this
# table are never equal.
UNITS = {}
for names in (
        "mm millimeter millimetre 毫米|cm centimeter centimetre 厘米|m meter metre 米|"
        "km kilometer kilometre 千米|in inch inche|ft foot feet|yd yard|mi mile|"
        "mg milligram|g gram 克|kg kilogram 千克|lb pound|oz ounce|"
        "ml milliliter mL|l liter litre|s sec second 秒|min minute 分钟|h hr hour 小时|day 天|week 周|"
        "month 月|yr year 年|/ per|2 square sq|3 cubic|am|pm|dollar 美元|cent|euro|sterling|"
        "jj|nn|ww|vv|kk|cc|ff|tt|hh|aa|Hz|kHz|MHz|GHz|kWh|kJ|kPa").split("|"):
    unit, *_ = names.split()
    for name in names.split():
        UNITS[name] = unit
        UNITS[name + "s"] = unit
# Other words after a number are units as well, up to three of them, if they do not change its value. A word
# of two letters or without a vowel may be a product of variables, such as kT. In 12元 and 5厘米 the unit is
# written without a space, but 7万 is 70,000, and 7以上 is 7 or more.
NAME = (rf"(?!{OPERATOR}|[abcnxyz]{{3}}\b|мил|млн|тыс|"
        r"\w*(?!千[克米瓦])[万萬亿億兆百千十割折半之倍多余以未和或만억천백십이미])"
        r"(?:(?=[a-z]*[aeiouy])[a-z]{3,}|[^\W\d_a-zA-Z]{1,10}|[cmk]m|kg|ml|ft|yd|sq)")
WORD = rf"(?:{NAME}|{'|'.join(filter(str.isalpha, UNITS))})(?![a-zA-Z])(?:\s*\^[({{]?[23][)}}]?)?"
BEHIND = rf"(?:\s+|(?={NAME})){WORD}(?:[ /]+{WORD}){{0,2}}$"
UNIT = rf"^((?:[^a-zA-Z\\]|\\[a-z]++)*(?<=[\d)}}i])){BEHIND}"
# A sentence may end with a number and its unit: 7 apples, $18, 20%.
MEASURED = rf"{SUBJECT}((?=.*(?:[$€£%°]|[^\W\d_]))[-*$€£]*\d[\d.,/]*[$%°*]*(?:$|{BEHIND}))"
# An answer may begin with a choice, as B) 12 does, but (A) or (B) does not. Or it may begin with a left side
# such as x =, f(x) =, 2*9 =, x = 2*9 =, or x \in; but x=1, y=2 stays as it is.
LEFT = (r"\s*(?:\(?([A-J])[).:,](?!.*\b[A-J]\b(?! [a-z]{2}))|"
        r"(?:(\\?[a-zA-Z][\w ]*(?:(?<=_)\{\w+})?(?:\([a-zA-Z]\))?)\s*(?:=(?!.*[,;].*=)|\\in\b))?"
        r"(?:(?:[^\w\\,;]|\d|\\[a-z]++)*=(?!\s*[a-z]))?)")
# A date, a time, a range, a score or a ratio looks like a sum or a quotient. There may be several of them.
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?%?"
DATE = f"{NUMBER}(?:(?:-{NUMBER})+|(?:/{NUMBER}){{2,}}|(?::{NUMBER})+)"
JOINED = f"{DATE}(?:[,;]{DATE})*"
# A row's answer is a worked solution if words stand next to each other in it and it has several lines or ends
# with a full stop. If it has eight words or more, its last sentence may have only one number, apart from
# those such as 5th.
SOLUTION = r"(?s)(?=.*[^\W\d_]{2},?\s+[^\W\d_]{2})(?=.*\n|.*[.!。]\s*$)"
ONLY_NUMBER = (rf"(?s)(?=(?:\S+\s+){{7}})(?:.*(?:\n|{STOP}))?(?:[^\d=\\\n]|\d+(?:st|nd|rd|th)\b)*?"
               rf"([-$€£]{{0,2}}{NUMBER}(?:/\d+)?)(?!\s*(?:\w+illion|thousand|hundred|dozen|st|nd|rd|th|\d))"
               r"[^\d=\\\n]*$")
# 1,234.5 and 1 234.5 are numbers.
THOUSANDS = r"[-+]? ?[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)? ?%?"
# A token is a digit of \frac12, a number such as 5, .5 or 1.2e5, a command such as \pi, a word, or any other
# character except %.
TOKEN = (r"(?i)(?<=\\frac)\s*\d|\.?\d+\.?\d*(?:e[-+]?\d{1,3}(?![\d_]))?|"
         r"\\[a-z]+|\\.|[a-z]{4,}|[^\s%]")
# A text with words is no formula: its letters are no factors. Such a text has
#     only letters, and three small ones in a row, one of e, i, o and u next to another, or three capitals
#     with blanks between them: Bob, b a c, no, U U D;
#     or a word of three letters or more next to another word or letter, or before a number: Bob has 3 dogs;
#     or such a word as a member of a list, unless that is a set in braces: yes, 5;
#     or a letter of no Latin or Greek alphabet next to another letter;
#     or a number behind a chemical element: H2O.
# So xy, mv^2, GMm and length = 5, width = 3 are formulas.
LETTER = r"[^\W\d_]"
NO_SIGN = r"[^\d\\|+*/^=<>_{]"
FOREIGN = r"[^\W\d_a-zA-ZͰ-Ͽ]"
WORDS = (rf"^(?=.*(?:[a-z]\s*[a-z]\s*[a-z]|[eiou][a-z]|[a-z][eiou]|[A-Z]\s[A-Z]\s[A-Z]))"
         rf"(?:(?!-){NO_SIGN})*$|"
         rf"^(?=.*{LETTER}{{4}}){NO_SIGN}*$|"
         rf"(?<![\\\w])(?:{LETTER}{{3,}}\s+(?:{LETTER}|\d)|{LETTER}+\s+{LETTER}{{3,}})|"
         r"^(?!.*\{)(?:(?:.*[,;])?\s*[a-z]{3,}\s*[,;]|.*[,;]\s*[a-z]{3,}\s*$)|"
         rf"{FOREIGN}\s*{LETTER}|{LETTER}\s*{FOREIGN}|(?<![\\\w])[A-Z][a-z]?\d")
# Between words a hyphen and other punctuation do not count, nor do blanks, except between digits; nor does a
# comma after a number, as in May 5, 2024.
BETWEEN_WORDS = (rf"(?<={LETTER})\s*[-.,;:!?'’\"]+\s*(?={LETTER}|$)|(?<![\d\s])(?<!\d,)\s+|"
                 r"\s+(?![\d\s])|(?<=\d),(?=\s)")
# A letter, a word, or a command that stands for a value. Any other command, and |, says something about its
# neighbours, so a formula with it is compared as a text: \overrightarrow{AB} is not \overrightarrow{BA}.
SYMBOL = r"""(?ix) [^\W\d_] | \\(?: (?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|
    lambda|mu|nu|xi|pi|rho|sigma|tau|upsilon|phi|chi|psi|omega) |
    infty | emptyset | ell | hbar | [lc]?dots )$"""
# Each level has operators that bind more tightly than those before it; the first has what ends an operand.
# `*` stands also between a and b in `ab`, and `(` is the operator of f(x), but not of (x+1)(x-1).
LEVELS = [r") ] } \}", ";", ",", r"= < > \le \ge \ne \in", r"\cup \cap", r"+ - \pm \mp", "* /", "^", "_ ("]
PRECEDENCE = {"": 0}
for level, operators in enumerate(LEVELS):
    PRECEDENCE |= dict.fromkeys(operators.split(), level)
SUM = PRECEDENCE["+"]
ATOM = PRECEDENCE["_"]
BRACKETS = {"()": "()", "{}": "{}", r"\{\}": "{}", "[]": "[]", "[)": "[)", "(]": "(]"}
# The package for algebra reads only a part of a formula with one of these. To it, 2k, k\in Z is 2k+1, k\in Z.
UNREAD = r"""(?x) \\(?:[lc]?dots|in|equiv|pmod|overline|dot)\b | \.{3} | … | \{cases | ' | \{[ ] |
    \^(?:\{-1\}\(|\{?T) | \{d[a-z]\} | [<>].*\band\b"""
# The function makes one number of the numbers of a sum or a product, and the number changes nothing in it.
FOLDS = {"+": (sum, 0), "*": (math.prod, 1)}


def value(text):
    """Return the exact value of text like -3, 0.5, 1/2 or 2*(3+4)^2 as a Fraction, and the set of its steps.

    A step is an operation between plain numbers that is still to be carried out: "+" in 5-3 and in x+5-3.
    For other formulas the value is a tree of nested tuples, in which the order of terms, of factors, and of a
    list 2, 1 or a set does not count; for a text that is no formula it is None.
    """
    # 1 \pm x is the list 1+x, 1-x, and a list is the set {1+x, 1-x}.
    text = re.sub(r"^([^,;(]*)\\pm([^,;(]*)$", r"\1+\2,\1-\2", text)
    parser = Parser(["{", *re.findall(TOKEN, text), "}", ""])
    with contextlib.suppress(ValueError, LookupError, ZeroDivisionError, RecursionError):
        tree = parser.formula(0)
        repr(tree)                              # raises ValueError if a number has over 4,300 digits
        if parser.tokens == [""]:
            return tree, parser.steps
    return None, set()


class Parser:
    """Makes a tree of the tokens of a formula, and collects its steps.

    tokens: what is still to be read, in reverse, so that the next token is the last. steps: as in `value`.
    """

    def __init__(self, tokens):
        self.tokens = tokens[::-1]
        self.steps = set()

    def formula(self, level):
        # Reads an operand, and goes on as long as the operators bind more tightly than the level.
        tree = self.operand(level)
        while True:
            op = self.operator(tree)
            if PRECEDENCE[op] <= level:
                return tree
            if op == self.tokens[-1] != "(":                    # f(x) keeps its bracket for the operand
                self.tokens.pop()
            elif re.match(r"\.?\d", self.tokens[-1]) and operator_of(tree) in (None, "*"):
                raise ValueError("2 3 may be 23, and words have no value: the 2 of 3")
            right_level = PRECEDENCE[op]
            if op == "^":
                right_level -= 1                                # 2^3^2 is 2^(3^2)
            tree = self.combined(op, tree, self.formula(right_level))

    def operator(self, tree):
        # Returns the operator that follows a tree. A number, a sum or a product before ( is no function.
        op = self.tokens[-1]
        factor = isinstance(tree, Fraction) or operator_of(tree) in ("+", "*")
        if op not in PRECEDENCE or op == "(" and factor:
            return "*"
        return op

    def operand(self, level):
        # Reads an operand with its sign, a group in brackets, a fraction, a function with its argument, a
        # name or a number.
        token = self.tokens.pop()
        if PRECEDENCE.get(token) == SUM:
            operand = self.formula(max(level, SUM))
            if isinstance(operand, Fraction) and operand < 0:
                self.steps.add("+")                             # -(-5)
            return applied(token, Fraction(0), operand)
        if token in ("(", "[", "{", r"\{"):
            return self.group(token)
        if token == r"\frac":
            return self.combined("/", self.formula(ATOM), self.formula(ATOM))
        if token in COMMANDS:
            index = None
            if self.tokens[-1] == "[":
                index = self.formula(ATOM)
            elif self.tokens[-1] in ("^", "_"):                 # \sin^2 x and \log_2 x
                index = self.tokens.pop(), self.formula(ATOM)
            argument = self.formula(ATOM)
            if is_constant(argument) and operator_of(index) not in ("^", "_"):
                self.steps.add(token)
            return token, index, argument
        if re.match(SYMBOL, token):
            return token
        return Fraction(token)                                  # raises ValueError for ! and ) and \setminus

    def group(self, opening):
        # Reads what is in brackets, and the closing one.
        tree = self.formula(0)
        brackets = BRACKETS[opening + self.tokens.pop()]
        # (5) is 5, but (1, 2) is a pair. The order of a set does not count, but that of 1; 2 does.
        separator = operator_of(tree)
        if separator not in (",", ";"):
            return tree
        if brackets == "{}" and separator == ",":
            tree = sorted(tree, key=repr)
        return brackets, *tree

    def combined(self, op, a, b):
        # Returns `a op b`, and notes a step if plain numbers meet in it: 2 and 2 in (x+2)+2 and in 2x*2, or
        # \sqrt2 and \sqrt3. A fraction of whole numbers, such as 3/4 or 3x/4, is no step, nor is 3\sqrt2.
        kind = {"-": "+", "/": "*"}.get(op, op)
        first = operands(kind, a)[0]
        second = operands(kind, b)[0]
        numbers = [tree for tree in (first, second) if isinstance(tree, Fraction)]
        step = False
        if not numbers:
            step = is_constant(a) and is_constant(b)
        elif len(numbers) == 2:
            whole = first.denominator == second.denominator == 1
            step = op != "/" or not whole or first % second == 0
        if step and kind in ("+", "*", "^"):
            self.steps.add(kind)
        return applied(op, a, b)


def operator_of(tree):
    # Returns the operator or the brackets of a tree, or None for a number or a name.
    if isinstance(tree, tuple):
        return tree[0]


def is_constant(tree):
    # Returns whether a formula has no variable.
    if isinstance(tree, tuple):
        return all(map(is_constant, tree[1:]))
    return isinstance(tree, Fraction) or tree in (None, r"\pi")


def operands(op, tree):
    # Returns the terms of a sum, the factors of a product, or the members of a list. Of any other tree it
    # returns the tree, and also of a power, because (a^b)^c is not a^b^c.
    if operator_of(tree) == op != "^":
        return tree[1:]
    return [tree]


def applied(op, a, b):
    # Returns the tree of `a op b`: a-b is a + b*(-1), and a/b is a * b^(-1).
    if op == "-":
        return applied("+", a, applied("*", b, Fraction(-1)))
    if op == "/":
        return applied("*", a, applied("^", b, Fraction(-1)))
    trees = [*operands(op, a), *operands(op, b)]
    numbers = [tree for tree in trees if isinstance(tree, Fraction)]
    # Larger powers than those of 4,000 digits stay as they are.
    if op == "^" and len(numbers) == 2 and b.denominator == 1 and abs(b) * len(str(a)) <= 4000:
        return a ** b
    if op in FOLDS:
        # The numbers of a sum or a product become one number, and the order of the others does not count.
        fold, neutral = FOLDS[op]
        number = fold(numbers)
        others = sorted([tree for tree in trees if tree not in numbers], key=repr)
        trees = [number, *others]
        if number == neutral and others:                        # x + 0 and 1x are x
            trees = others
        if len(trees) == 1:
            return trees[0]
    return op, *trees


@dataclass
class Reading:
    """What an answer says."""
    value: object   # a Fraction, a tree of tuples for a formula, (":", text) if it is JOINED or has WORDS, or
                    # a text
    values: set     # the value, and others that it may have: 3 h may be 3*h, 50% may be 1/2, 1/9 may be 1:9
    steps: set      # the operations that are still to be carried out, as in `value`
    text: str       # the plain spelling, without left side and unit
    name: str       # the left side, x or f(x)
    unit: list      # words of UNITS, sorted, with exponents, and / for per
    choice: str     # the b of B) 12, or None


@functools.lru_cache
def read(text):
    """Return the Reading of an answer."""
    if len(normalize("NFKC", text)) > 500:
        return Reading(text, {text}, set(), "", "", [], None)
    for pattern, replacement in CLEANING.items():
        text = re.sub(pattern, replacement, text)
    left = re.match(LEFT, text)
    choice, name = left.groups(default="")
    # x_{1} is x_1, and y is f(x). A word does not count: area = 5 is A = 5.
    name = re.sub(r"[ {}]|\\angle|^.*(?<![\\a-z])[a-z]{3}.*", "", name).replace("f(x)", "y")
    text = text[left.end():]
    bare = re.sub(UNIT, r"\1", text)
    unit = sorted(UNITS[word] for word in re.findall(r"\w+|/", text[len(bare):]) if word in UNITS)
    if "%" in text:
        unit = ["%"]
    digits = re.sub("[, ]", "", bare) if re.fullmatch(THOUSANDS, bare) else bare
    tree, steps = value(digits)
    values = {tree, value(text)[0]}
    joined = re.fullmatch(JOINED, bare.replace(" ", ""))
    if joined:
        # 3:07 is 03:07, and 1,000-2,000 is 1000-2000.
        tree = ":", re.sub(r"(?<![\d.,])0+(?=\d)|,(?=\d{3})", "", joined[0])
        values = {tree}
    elif re.search(WORDS, bare):
        tree = ":", re.sub(BETWEEN_WORDS, "", bare).lower()
        values = {tree}
    elif tree is None:
        tree = " ".join(re.findall(TOKEN, text))
        if not re.search(r"[\\|]", tree):                       # in a formula A is not a
            tree = tree.lower()
        values.add(tree)
    elif isinstance(tree, Fraction):
        values.add(("%", tree / 100 if "%" in text else tree))
        if "." not in text:
            values.add((":", str(tree).replace("/", ":")))
    return Reading(tree, values - {None, ""}, steps, bare, name, unit, choice.lower() or None)


# ------------------------------------------------------------------------------------------------------------
# comparison


def comparison(answer, truth):
    """Return whether an answer is the right one, or None if algebra could still show that it is.

    It is if the two are equal as exact values or formulas, or as text if one of them is no formula. Spaces,
    LaTeX's spellings and % do not count: 50% is 50 and 1/2, but 0.5% is 0.005. Nor does the order of terms,
    of factors, and of a list or a set, except between semicolons and in a text with words. A unit, a
    currency or a letter before = counts only if both answers have one. An answer with an operation between
    plain numbers that is still to be carried out, as in 2+2 or 18/3, is wrong, unless the truth has this
    operation. It never raises, and no input makes it slow.
    """
    mine, right = read(answer), read(truth)
    for part in ("name", "unit", "choice"):
        a = getattr(mine, part)
        b = getattr(right, part)
        if a and b and a != b:
            return False
    # B) 12 is B.
    if mine.value == right.choice or right.value == mine.choice:
        return True
    if not mine.steps <= right.steps:
        return False
    if mine.values & right.values:
        return True
    # Algebra cannot make a formula a number, nor two numbers equal, nor numbers in a base or other brackets.
    # Nor is the package asked about what it would misread.
    kinds = {operator_of(mine.value), operator_of(right.value)} & {"_", ":", *BRACKETS.values()}
    if isinstance(right.value, Fraction) or len(kinds) > 1 or kinds & {"_", ":"} or re.search(
            UNREAD, mine.text + right.text):
        return False
    return None


def final_answer(text):
    """Return the final answer in a text, "" if it has none, in a form in which answers that agree are equal:
    0.5 is 1/2, and B) 12 is b. What is still to be carried out, such as 2+2, is another answer."""
    answer = extract_answer(text)
    if not answer:
        return ""
    reading = read(answer)
    value = str(reading.value) or answer
    return reading.choice or " ".join([value, *sorted(reading.steps)])


def check_answer(text, truth, algebra=False):
    """Return whether a completion's final answer is the truth.

    truth: a text, which may be a worked solution, a number, or True or False, for which yes and no count as
    well. It may also be a list of these, or a list of texts as JSON, of which one is enough. A short line
    without a final answer is compared as a whole.
    algebra: whether to ask the package math-verify where exact values do not decide. Set a time limit for
    that.
    """
    answer = extract_answer(text)
    answers = []
    if answer:
        answers = [answer]
    elif len(text) <= 100 and not re.search("[=\n]", text.strip()):
        answers = [text]
    if algebra and not answer:
        # The package looks for an answer in the last lines.
        tail = "\n".join(text.splitlines()[-10:])[-2000:]
        answers += [part for part in parsed(tail) if isinstance(part, str)]
    texts = [*alternatives(truth)]
    for known in [*texts, *map(right_answer, texts)]:
        for answer in answers:
            same = comparison(answer, known)
            if same or same is None and algebra and by_algebra(answer, known):
                return True
    return False


def alternatives(truth):
    # Returns the texts of which one is the right answer. ["4", "5"] are two, but [4, 5] is an interval. True
    # and False have two names each.
    if truth is True:
        truth = ["true", "yes"]
    elif truth is False:
        truth = ["false", "no"]
    if isinstance(truth, str) and re.match(r'\[\s*"', truth):
        with contextlib.suppress(ValueError):
            truth = json.loads(truth)
    if not isinstance(truth, (list, tuple)):
        truth = [truth]
    return map(str, truth)


# ------------------------------------------------------------------------------------------------------------
# algebra, by the package math-verify


def parsed(text):
    # Returns what the package reads in a text. Only those who use the package wait for this import.
    import math_verify
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The package's own time limits are off, because they use SIGALRM, which another library may be using.
    return math_verify.parse(text, parsing_timeout=None)


def by_algebra(answer, truth):
    # Returns whether the package finds that the two are equal.
    from math_verify import verify
    mine = parsed(f"${read(answer).text}$")
    right = parsed(f"${read(truth).text}$")
    # The default rounding would take 3.14159265 for pi.
    return verify(right, mine, float_rounding=30, timeout_seconds=None)
