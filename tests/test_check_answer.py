"""Tables of what the answer checker must say, and of what must not make it slow."""
import math
import random
import re
import signal
import sys
import time
from fractions import Fraction  # noqa: F401       a text that is evaluated names it

import pytest

from options import user_rewards
from bench import answers
from tasks import check_answer
from test_rewards import found, in_process


@pytest.mark.parametrize("text, answer", [
    (r"so \boxed{5}", "5"), (r"\boxed {5}.", "5"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\boxed{5}}", "5"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{5} \boxed{6", "5"), (r"\boxed{5", None), (r"\boxed{}", None), (r"} \boxed{5}", "5"),
    (r"\boxed{[1, \}}", r"[1, \}"),
    (r"\boxed{5}{6}", "5"), (r"{ \boxed{5}", "5"), (r"{a}", None),
    ("Answer: 5", "5"), ("answer:5\nmore", "5"), ("The final ANSWER: 5 cm\n", "5 cm"),
    ("**Answer:** 5", "5"),
    ("**Answer**: 5", "5"), ("**Answer: 5**", "5"), ("Answer: 5\nAnswer: 6", "6"),
    ("Answer: 5\nAnswer:\n", "5"),
    ("Answer:\n5", "5"), ("The answer is 5", "5"), ("5", "5"), ("", None),
    ("#### 72", "72"), ("####72\n", "72"), ("#### 1\n#### 2", "2"), ("##### 5", None), ("### 5", None),
    ("#### Answer: 5", "5"), (r"Answer: $\boxed{5}$", "5"), (r"\boxed{5} Answer: 6", "5"),
    (r"Answer: 6 or \boxed{5}", "5"), ("Answer: 6\n#### 5", "5"), ("#### 5\nAnswer: 6", "6"),
    ("Answer: `5`", "5"), ("Answer: {5}", "{5}"), ("Answer: 5\r\nok", "5"),
    ("\\boxed{5}\n#### Check\nIt is 5.", "5"), (r"$\boxed 5$", "5"), (r"\boxed 12.", "12."),
    (r"\fbox{5}", "5"),
    (r"$\boxed{1}$ and $\boxed{2}$.", "1, 2"), (r"\boxed{1}, \boxed{2}, \boxed{3}", "1, 2, 3"),
    (r"\boxed{5}, \boxed{5}", "5"), (r"\boxed{1}, so \boxed{2}", "2"), (r"\boxed{1} or \boxed{2}", "2"),
    (r"Since $x=\sqrt{9}$, $\boxed{3}$", "3"), (r"\frac{1}{2} and \boxed 3", "3"), (r"\fbox{1} and \fbox{2}", "1, 2"),
    ("<answer>5</answer>", "5"), ("<answer>\nx = 5,\ny = 6\n</answer> Bye", "x = 5,\ny = 6"),
    ("<answer> 5\nok", "5"),
    ("<answer>5</answer>\n<answer> </answer>", "5"), ("<answer>It is \\boxed{5}</answer>", "5"),
    ("5</answer>", "5"), ("<answer>\nAnswer: 5\nBye.\n</answer>", "5"),
    ("Answer:\n\n5\nok", "5"), ("Answer: $$\n\\frac12\n$$\nok", r"\frac12"),
    ("**Answer:**\n\\[5\\]\nok", r"\[5\]"),
    ("Answer: 5 (since 2+3)", "5"), ("Answer: 5, because it is", "5,"), ("Answer: The answer is 5", "5"),
    ("The final answer is 5", "5"), ("Final Answer: The final answer is $5$. I hope it is correct.", "$5$"),
    ("Answer: 5\nI hope that the final answer is clear", "5"), ("Answer：5", "5"), ("answers: 5", None),
    ("The final answer is: 5", "5"), ("The final answer is **18**.", "18"), ("Answer: *18*.", "18"),
    ("Answer: 5\n\n#### Check\nIt fits.", "5"), ("#### Final Answer\n5", "5"), ("### Final Answer\n42", "42"),
    ("**Final Answer**\n\n42", "42"), ("**Answer**\n\n5", "5"), ("#### Paris", "Paris"), ("#### 5\nBye", "5"),
    (r"<think>a \boxed{4}</think><answer>5</answer>", "5"), (r"<think>\boxed{4}</think> Bye", "4"),
    # The thoughts of other models end with other marks.
    *[(rf"{mark}a \boxed{{4}}{end}5", "5") for mark, end in (
        ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<longcat_think>", "</longcat_think>"),
        ("<|inner_prefix|>", "<|inner_suffix|>"), ("<thought>", "</thought>\n"), ("◁think▷", "◁/think▷"),
        ("<reasoning>", "</reasoning>\n"), ("<|channel>thought\n", "<channel|>"), ("<thinking>", "</thinking>"),
        ("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
        ("<|begin_of_thought|>", "<|end_of_thought|>\n\n<|begin_of_solution|>\n"),
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"))],
    (r"<|channel|>analysis<|message|>\boxed{4}", "4"),
    # A box that is only spoken of
    ("Mark your solution with \\boxed \nThe answer is 5", "5"), ("\\boxed{5}\n\nThat is in \\boxed format.", "5"),
    (r"\boxed{5}, as asked: \boxed{your answer}", "5"), (r"\boxed{5}. I wrote \boxed{answer}.", "5"),
    (r"\boxed{...} is \boxed{5}", "5"), (r"\boxed{f'}", "f'"),
    ("**Answer: 5** ✅", "5"), ("Answer: 5 ✓", "5"),
    ("Answer: 5</s>", "5"), ("Answer: 5<|im_end|>\nok", "5"), ("Answer: 5</think>", "5"),
])
def test_extract_answer(text, answer):
    assert check_answer.extract_answer(text) == answer


EQUAL = [
    ("5", "5"), ("+3", "3"), ("−3", "-3"), ("- 5", "-5"), ("007", "7"), ("(5)", "5"), ("5 ", " 5"),
    ("1/2", "0.5"), ("2/4", "1/2"), (r"\frac{1}{2}", "1/2"), (r"\dfrac{1}{2}", ".5"),
    (r"\tfrac{2}{4}", "1/2"),
    (r"-\frac12", "-0.5"), (r"\frac{-1}{2}", "-1/2"), (r"\frac 1 2", "0.5"), ("−1/2", "-0.5"),
    ("1 1/2", "3/2"), (r"1\frac{1}{2}", "1.5"), (r"-1\frac12", "-3/2"),
    ("0.50", "1/2"), (".5", "0.5"), ("5.", "5"), ("5.0", "5"), ("0.1", "1/10"),
    ("1,234", "1234"), ("-1,234", "-1234"), ("1{,}234", "1234"), (r"1\,234", "1234"), (r"1\!,234", "1234"),
    ("1 234", "1234"),
    ("1,234,567.5", "1234567.5"),
    ("50%", "50"), ("50%", "1/2"), (r"50\%", "50"), ("20%", "20 percent"), ("$5", "5"), (r"\$5", "5"), ("£5", "5"),
    ("€5", "5"), ("0.5%", "1/200"),
    ("$1,234.50", "1234.5"), (r"$\$5$", "5"), ("5 dollars.", "5"),
    ("5 apples", "5"), ("5 cm", "5"), ("5cm", "5"), (r"5\text{ cm}", "5"), (r"5\ \text{m}", "5"),
    ("5~kg", "5"), ("5 m", "5"),
    ("12 m^2", "12"), ("12 cm^{2}", "12"), (r"12\text{ cm}^2", "12"), ("60 km/h", "60"),
    ("60 miles per hour", "60"),
    ("3/4 cups", "0.75"), (r"\frac{3}{4}\text{ cups}", "3/4"),
    ("90°", "90"), (r"90^\circ", "90"), (r"90^{\circ}", "90"), ("90 degrees", "90"),
    ("x = 5", "5"), ("x=5", "x = 5"), ("y=2x+3", "2x+3"), ("$x=5$", "5"), ("$5$", "5"), (r"\(5\)", "5"),
    (r"\[5\]", "5"),
    ("2*3", "3*2"), ("2^3", "2**3"), ("2^{3}", "2^3"), (r"2\times 10^3", "2000"),
    ("Paris", "paris."), ("(1, 2)", "(1,2)"), (r"\left(3,4\right)", "(3,4)"), (r"\text{A}", "A"),
    ("1,2", "1, 2"),
    (r"\frac{\sqrt{3}}{2}", r"\dfrac{\sqrt{3}}{2}"), ("3 : 4", "3:4"), ("2(3)", "2 (3)"),
    (r"\mathbf{x}", "x"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix}1\\[2pt]2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)", r"\begin{pmatrix}1&2\\3&4\\\end{pmatrix}"),
    ("x^{2}", "x^2"), ("x^{10}", "x^10"), ("52_{8}", "52_8"), (r"\sqrt2", r"\sqrt{2}"),
    (r"\frac9{19}", "9/19"), ("C", "(C)"), (r"\text{(C)}", "C"),
    ("1/A", r"\frac{1}{A}"), ("-1/A", r"-\frac{1}{A}"), ("-1/A", r"\frac{-1}{A}"), (r"x\in[1,2]", "[1,2]"),
    (r"x \in (-\infty, 3]", "(-∞,3]"), (r"(-\infty, \infty)", r"(-\infty, +\infty)"),
    (r"\textit{East}", "east"), ("2π", r"2\pi"), ("2 pi", r"2\pi"), (r"3\cdot\sqrt{2}", r"3\sqrt2"),
    (r"2\cdot x", "2x"), ("2*x", "2x"), (r"\frac{\sqrt3}{2}", r"\dfrac{\sqrt{3}}{2}"),
    ("(0.5, 1)", r"(\frac12, 1)"), (r"\{1,2\}", r"\left\{1, 2\right\}"),
    (r"[1,2)\cup(3,4]", r"\left[1,2\right) \cup \left(3,4\right]"), (r"3\frac12x", r"\frac72 x"),
    (r"x \le 5", r"x\leq5"), (r"x \le 5", "x <= 5"), (r"\frac{x+1}{2}", "(x+1)/2"), ("f(x)=2x", "2x"),
    (r"3 \times 10^{8}", "300000000"), (r"\sqrt[3]{2}", r"\sqrt[3]2"), (r"5\,\mathrm{~cm}", "5"),
    (r"\text{no solution}", "No solution."), (r"A \text{ and } B", "a and b"), (r"\\frac{1}{2}", "0.5"),
    (r"y = \frac{1}{2} x", r"y=\frac12x"), (r"90^{\circ}", "90"), ("10^{-3}", "0.001"),
    (r"i\sqrt{3}", r"i \sqrt3"), (r"\frac{m}{M+m}", "m/(M+m)"), ("Alabama", r"\text{alabama}"), ("GM", "gm"),
    (r"\Big(1,2\Big)", "(1,2)"), (r"\frac{x^{2}}{A}", "x^2/A"),
    (r"3\cdot 4!", "3*4!"), ("5e0", "5"), ("1e-05", "0.00001"), ("1.2e5", "120000"),
    ("1.2E5", r"1.2\times10^{5}"),
    (r"\frac{1}{2}h", r"\frac{1}{2} h"), ("3h", "3 h"), ("AB=5", "5"), (r"\cos x=\frac12", r"\frac{1}{2}"),
    ("x_1 = 3", "x_{1}=3"), ("f(x)=3x", "y=3x"), ("area = 5", "A = 5"), ("12 cm^2", "12 square centimeters"),
    ("60 km/h", "60 km per hour"), ("5 cents", "5"), ("$5", "5 dollars"), ("18 months", "18"),
    ("5 apples per day", "5 per day"), (r"12\pi\text{ cm}^2", r"12\pi"),
    (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}"),
    (r"\frac{3}{4}\text{ m}", "0.75"),
    (r"\dbinom{5}{2}", r"\binom{5}{2}"), (r"\varnothing", r"\emptyset"),
    (r"x \lt 2", "x<2"), (r"x\gt2", "x > 2"), (r"90\degree", "90"), ("½", "0.5"), (r"\lvert x\rvert", "|x|"),
    (r"\{3,1,2\}", r"\{1,2,3\}"), ("5, 3", "3, 5"), (r"3\text{ and }2", "2, 3"), ("3,-3", r"\pm 3"),
    ("{3, 4}", r"\{3,4\}"), (r"1+\sqrt{2}, 1-\sqrt{2}", r"1 \pm \sqrt{2}"),
    (r"\{5\}", "5"), ("2+3=5", "5"), (r"3\cos x", r"3\cos(x)"), ("5 kph", "5 km/h"),
    ("1+x", "x+1"), ("4i+3", "3+4i"), ("y^2+x^2=25", "x^2+y^2=25"), (r"\frac{mv^2}{2}", r"\frac12 m v^2"),
    (r"\frac{2\pi}{3}", r"\frac23\pi"), (r"\frac{-1+\sqrt5}{2}", r"\frac{\sqrt{5}-1}{2}"), ("9*2=18", "18"),
    ("(n-2) 2^{n}+1", "(n-2)2^n+1"),
    ("1/2x", r"\frac12 x"), ("(x+2)(x-1)", "(x-1)(x+2)"), ("[5]", "5"), (r"\{1,2\}", "1, 2"),
    (r"\ln 2", r"\ln(2)"), (r"\ln{2}", r"\ln 2"), (r"\sin x", r"\sin(x)"), (r"\cos\theta", r"\cos(\theta)"),
    # gpt-oss writes the minus sign as U+2011.
    (r"\frac{ 1 }{ 2 }", "1/2"), (r"\tan x\sec x", r"\sec x\tan x"), (r"\vec b+\vec a", r"\vec{a}+\vec{b}"),
    (r"\hat y", r"\hat{y}"), ("12 sec", "12 s"), ("37 C", "37°C"), ("37C", "37"),
    ("\u20115", "-5"), ("5 °C", "5"), (r"5^\circ\text{C}", "5°C"), (r"5^{\circ}F", "5"), ("5 mL", "5 ml"), ("5 kWh", "5"),
    ("5 Hz", "5"), (r"\textcolor{red}{5}", "5"), (r"\color{blue}{\frac12}", "0.5"), (r"\bm{5}", "5"), (r"{\bf 5}", "5"),
    (r"\nicefrac{1}{2}", "0.5"), (r"\sin^2 x", r"\sin^{2}(x)"), (r"x\log_2 3", r"\log_{2}(3) x"), (r"|x-1|", r"\lvert x - 1 \rvert"),
    ("US$5", "5"), (r"US\$5", "$5"), ("Rs. 5", "5"), ("Rs 1,250", "1250"),
]
UNEQUAL = [
    ("5", "6"), ("5", "-5"), ("5", "5.0000001"), ("0.333", "1/3"), ("10^2", "102"),
    ("2^3", "6"),
    ("1,2", "12"), ("1,23", "123"), ("1234,567", "1234567"), ("1 2", "12"), ("1 2", "3"), ("1 1/2", "11/2"),
    ("5 5", "5"),
    ("5x", "5"), ("5 x", "5"), ("3pi", "3"), ("3 pi", "3"), (r"3\pi", "3"), ("5!", "5"), ("sqrt(4)", "2"),
    ("5i", "5"),
    ("5 million", "5"), ("5 hundred", "5"), ("4 not five", "4"), ("5 minus one", "5"),
    ("5 percent less", "5"), ("2 squared", "2"), ("5 is what I get in the end", "5"), ("4^0.5", "2"),
    ("2 dozen", "2"), ("5 or more", "5"), ("5 or 6", "5"), ("5 apples and 3 pears", "5"),
    ("5 and a very long remark", "5"), ("x", "y"), ("(1,2)", "(2,1)"), ("a b", "c"), ("-x", "x"),
    ("", ""), ("", "5"), ("$", "$"), ("1/0", "5"), ("0^-1", "0"), ("2^0.5", "1"), ("--", "0"), ("(5", "5"),
    ("5)", "5"), ("5+", "5"),
    ("0x5", "5"), ("1_0", "10"), ("inf", "nan"), ("abs(-5)", "5"), ("int('5')", "5"),
    ("__import__('os')", "5"),
    ("9^9^9^9", "5"), ("2^5000", "5"), ("5", "x=6"),
    ("52_8", "528"), ("52_8", "52"), ("(1,2)", "[1,2]"), ("(1,2)", "1,2"), ("(1,2)", "(2,1)"),
    ("(1,2)", r"\{1,2\}"), ("x^{2}3", "x^{23}"), ("2^{3}4", "2^{34}"), (r"2\frac{1}{A}", r"\frac{21}{A}"),
    ("f(x)^2", "f(x^2)"), (r"\sin(x)^2", r"\sin(x^2)"), (r"\sin(2)x", r"\sin(2x)"),
    (r"\log_2(x)y", r"\log_2(xy)"), (r"2\pm3x", r"(2\pm3)x"), ("1/2x", r"\frac{1}{2x}"),
    (r"\infty", r"-\infty"), ("x=2", "y=2"), ("5 cm", "5 m"), ("5 miles", "5 km"),
    ("60 km/h", "60 mi/h"), ("50 cents", "50 dollars"), ("3,14", "314"), ("3{,}14", "314"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}12\end{pmatrix}"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\{1 2\}", r"\{12\}"), (r"\sqrt{2}3", r"\sqrt{23}"), (r"\sqrt2x", r"\sqrt{2x}"),
    (r"\sqrt[3]{2}", r"3\sqrt2"), (r"\sqrt[3]{2}", r"\sqrt{2}"), ("x_1", "x1"), ("x^2", "x_2"),
    ("x<5", r"x\le5"), ("x<5", "x>5"), ("A", "B"), ("-x", "x"), ("6 xy", "6"), (r"3 \theta", "3"),
    ("a-(b-c)", "a-b-c"), ("a/(b/c)", "a/b/c"), ("(a-b)^2", "a-b^2"), ("-2^2", "4"), ("(x+1)/2", "x+1/2"),
    ("2^{x+1}", "2^x+1"), (r"x \in [1,2]", r"x \notin [1,2]"),
    ("|x|", "x"), ("n!", "n"), (r"\bar{x}", "x"), ("x'", "x"), (r"\emptyset", "0"), (r"2\sin x", r"2\sin"),
    (r"f\circ g", "fg"), ("0.5%", "0.5"), ("1/20", r"0.05\%"), ("0.5 percent", "0.5"),
    (r"\frac{m}{M+m}", r"\frac{M}{M+m}"), ("GMm", "GMM"), (r"\Delta", r"\delta"),
    (r"3\cdot 4!", "12!"), (r"\frac{2n!}{n!}", r"\frac{(2n)!}{n!}"), ("2^n!", "(2^n)!"), ("2f'", "(2f)'"),
    (r"\frac{1}{2}!", r"\frac{1}{2!}"), (r"\frac{1}{2} mv^2", r"\frac{1}{2} kx^2"), ("3 dx", "3"),
    (r"\frac{1}{2} mv^2", r"\frac12"), (r"\frac{3}{2} kT", r"\frac{3}{2}"),
    (r"\cos x=\frac12", r"\sin x=\frac12"), (r"\ln x=2", "x=2"), ("xy=6", "x=6"), ("AB=5", "BC=5"),
    ("x_1=3", "x_2=3"), ("x_{1}=3", "x_2=3"), ("P(A)=0.5", "P(B)=0.5"), ("5 cm^2", "5 cm"),
    ("5 km/h", "5 km"),
    ("5 per day", "5 per hour"), ("5 euros", "5 dollars"), ("€5", "$5"), (r"\$5", "5 cents"), ("£5", "$5"), ("-$5", "-€5"),
    ("5 N", "5"), (r"2\pi C", r"2\pi"), ("5 millimetres", "5 metres"), ("10 times", "10"), ("2 root", "2"), ("5 days", "5 dollars"),
    (r"5\text{ J}", r"5\text{ N}"),
    (r"12\pi\text{ cm}", r"12\pi\text{ m}"), ("5 halves", "5"), ("5 tenths", "5"), ("3 factorial", "3"),
    ("2 out of 3", "2"), ("5 below zero", "5"), ("3 to 5", "3"), ("5 hundredths", "5"),
    (r"\Sigma", r"\sigma"),
    ("0.333...", "0.333"), (r"0.333\ldots", "0.333"), ("0,500", "500"),
    ("1e3_{16}", "1000_{16}"),
    ("(A) and (B)", "A"), ("B) or C)", "B"), ("(A)+B", "A"), (r"(A) \cup B", "A"), ("B) 12", "C"),
    ("{3, 4}", "(3,4)"), ("2:3:4", "4:3:2"), ("6:01:00", "1:06:00"), ("C. 5", "C. 6"), ("x+1", "1-x"),
    ("40/3=a", "a"), ("it equals 2", "it equals 3"), ("the 2 of 3", "the 3 of 2"), ("5°C", "5°F"), ("5 mL", "5 L"),
    # A sign says something about its neighbours, so these must not change places.
    (r"0.\overline{3}", r"0.\overline{4}"), (r"0.1\overline{6}", r"0.6\overline{1}"), (r"0.\dot{3}", r"0.\dot{4}"),
    (r"\overrightarrow{AB}", r"\overrightarrow{BA}"), (r"A\setminus B", r"B\setminus A"), ("P(A|B)", "P(B|A)"),
    (r"A \subset B", r"B \subset A"), (r"p \to q", r"q \to p"), (r"n \bmod m", r"m \bmod n"), (r"\binom{n}{2}", r"\binom{2}{n}"),
    (r"\vec{a} b", r"\vec{b} a"), ("|x| y", "|y| x"), (r"\neg p q", r"p \neg q"), (r"\lfloor x\rfloor y", r"\lfloor y\rfloor x"),
    (r"\sin^2 2x", r"2\sin^2 x"), (r"\log_2 3x", r"3\log_2 x"), (r"\sec 2x", r"2\sec x"),
    # In a formula A is not a.
    ("P(a|b)", "P(A|B)"), ("|A|", "|a|"), (r"\vec{A}", r"\vec{a}"), (r"\binom{N}{k}", r"\binom{n}{k}"),
    (r"n \bmod M", r"n \bmod m"), ("37 C", "37 °F"),
]


@pytest.mark.parametrize("given, truth", EQUAL)
def test_same_answer(given, truth):
    assert check_answer.comparison(given, truth) is True and check_answer.comparison(truth, given) is True


# What a row asks for, and answers that have its value, or seem to, and leave an operation to be carried out.
RESTATED = {
    "4": ["2+2", "x = 2+2", "4 = 2+2", "2+2=2+2", "6-2", "4/1", r"\sqrt{16}", "-(-4)", "--4", "4+0", "4*1", "4^1",
          "2+2 apples", r"\text{2+2}", "2＋2", "2^{2}", "2²", "2**2", r"\sqrt[3]{64}", r"16^{1/2}", r"\log_2 16"],
    "12": [r"3\cdot 4", r"3\times4", "3×4", "24÷2", r"24 \div 2", "3(4)", "(12)(1)", "36/3", "$3*4", r"60 \cdot 20\%",
           r"\binom{12}{1}", r"\frac{36}{3}", "(2+1)*4", r"\dfrac{24}2", "2+5*2", "10 2/1"],
    "266": ["17*23-5^3"], "40": ["57 - 17"], "6": [r"\frac{18}{3}", "2(3)", "3!"], "-6": ["2*-3"], "-2": ["3-5"],
    "14": ["2+3*4"], "20": ["(2+3)*4", "50% of 40", r"50\%\cdot 40"], "512": ["2^3^2"], "-4": ["-2^2"], "1": ["-2+3"],
    "1024": ["2^{10}"], "6000": ["3*2*10^3"], "1000": ["10^{2+1}", r"10^2 \cdot 10"],
    "29/35": [r"\frac37+\frac25"], r"\frac{1}{6}": [r"\frac{\frac12}{3}", r"\frac12 \cdot \frac13"],
    "3/7": [r"\frac{3}{5}\div\frac{7}{5}", r"\frac{\frac{3}{5}}{\frac{7}{5}}"], "0.75": ["1.5/2", "1-0.25"],
    "1.5": ["1+1/2", "(1+1/2)"], "0.5": ["2^-1", r"\sin 30^\circ", r"\cos(\pi/3)"], "50%": ["100/2%"],
    "(4, 5)": ["(2+2, 5)"], "[4, 5)": ["[2+2, 5)"], r"\{4, 5\}": [r"\{2+2, 5\}"], "4; 5": ["4; 2+3"],
    "1, 2": ["2/2, 2", r"\sqrt{1}, 2"], "x=4, y=5": ["x=2+2, y=5"],
    r"\begin{pmatrix}4&5\\6&7\end{pmatrix}": [r"\begin{pmatrix}2+2&5\\6&7\end{pmatrix}"],
    r"3\sqrt{13}": [r"\sqrt{13}+\sqrt{52}", r"(1+2)\sqrt{13}"], r"\sqrt6": [r"\sqrt2\cdot\sqrt3"], "2^{10}": ["1000+24"],
    r"\frac{\pi}{2}": [r"\frac{\pi}{4}+\frac{\pi}{4}", r"\arcsin(1)"], r"6\pi": [r"2\pi\cdot3"],
    "12x": ["3x*4", r"3\cdot4x"], "x+5": ["x+2+3"], "6-5i": ["10-4-5i"]}
# What is no such operation
CARRIED_OUT = {
    "4": ["2+2=4", r"\frac{8}{2}=4", r"\sqrt{16} = 4", "1+3=2+2=4", "x = 2+2 = 4", "+4", "(4)", r"\log_2 16 = 4", r"\binom{4}{1} = 4",
          "|-4| = 4"], "B": ["B) 2+2"],
    "3/7": ["6/14", r"\frac{6}{14}"], "-3/7": [r"-\frac{3}{7}", r"\frac{-3}{7}", r"\frac{3}{-7}"], "0.5": ["1/2", "2/4"],
    "1.5": ["1 1/2", r"1\frac12", "1½"], "1500": [r"1.5\times10^{3}", "1.5 x 10^3", "1.5e3", "15 * 10 ^ {2}"],
    "1000": ["10^3", "10 ^ { 3 }", "10^3.", r"1.0\times 10^3."], "0.001": ["10^{-3}"], "-1000": ["-10^3"], "300": [r"3\times10^2\text{ m}"],
    r"3\sqrt{13}": [r"\sqrt{13}\cdot3"], "1/2": ["50%", r"50\%"], "50%": ["1/2", "0.5", "50"], "2^{10}": ["1024", "4^5"],
    "2*3": ["6", "3*2"], "18/3": ["6", "18/3"], r"\frac{2\pi}{3}": [r"\frac23\pi", r"\frac{4\pi}{6}"],
    "1.5m": [r"\frac{3m}{2}"], r"1\pm\sqrt{19}": [r"1+\sqrt{19}, 1-\sqrt{19}"], "6-5i": ["-5i+6"],
    "(1/2, 3)": [r"(\frac12, 3)", "(0.5, 3)"], "5!": ["5!"], "5": ["~5"]}
# Dates, times, ranges, scores and ratios, with what is another one, and what is the same.
JOINED = [
    ("2024-01-15", ["2024-02-14", "2008", "2024/01/15"], ["2024-01-15"]), ("2020/05/04", ["2020/04/05"], ["2020/05/04"]),
    ("5-10", ["10-15", "-5", "5-11", "5"], ["5–10", "5 - 10", "5-10 minutes"]), ("2000-2004", ["1999-2003"], []),
    ("5-10 minutes", ["10-15 minutes", "5-10 hours"], ["5-10"]), ("3-2", ["2-1", "1", "2-3"], ["3 - 2"]),
    ("12:30", ["4:10", "2/5", "0.4", "12:30:00"], ["12:30 pm"]), ("12:30 pm", ["12:30 am", "12:30 a.m."], ["12:30pm", "12:30 P.M."]),
    ("3:07", ["3:70", "30:7"], ["03:07"]), ("2024-1-5", ["2024-10-5"], ["2024-01-05"]), ("3 PM", ["3 a.m."], ["3 p.m."]),
    ("1,000-2,000", ["100-200", "1,00-2,00"], ["1000-2000"]), ("1,050-2", ["150-2"], ["1050-2"]), ("1.05:1", ["1.5:1"], []),
    ("1:9", ["9:1", "1.9", "2:18"], ["1/9", r"\frac{1}{9}", "1 : 9"]), ("1:2", ["0.5"], ["1/2"]), ("4:1", ["4"], []),
    ("6:8", ["3:4"], []), ("1/9", [], ["1:9"]), (r"5\%-10\%", [r"10\%-15\%"], ["5%-10%"]), ("1.5-2.5", ["-1"], []),
    ("2-1, 6-2", ["3-2, 5-1", "1, 4"], ["2-1,6-2"]), ("8/4/2", ["1"], []), ("8-3-2", ["3"], []), ("1", ["3-2", "2:2"], []), ("2008", ["2024-01-15"], [])]


@pytest.mark.parametrize("algebra", [False, True])
@pytest.mark.parametrize("truth", RESTATED)
def test_an_operation_that_is_left_is_no_answer(truth, algebra):
    for given in RESTATED[truth]:
        assert not check_answer.check_answer(rf"So it is $\boxed{{{given}}}$.", truth, algebra), given


@pytest.mark.parametrize("algebra", [False, True])
@pytest.mark.parametrize("truth", CARRIED_OUT)
def test_a_number_may_be_written_with_operations(truth, algebra):
    for given in CARRIED_OUT[truth]:
        assert check_answer.check_answer(rf"So it is $\boxed{{{given}}}$.", truth, algebra), given


@pytest.mark.parametrize("algebra", [False, True])
@pytest.mark.parametrize("truth, others, same", JOINED)
def test_dates_ranges_and_scores_are_no_sums(truth, others, same, algebra):
    for given in others:
        assert not check_answer.check_answer(rf"So it is $\boxed{{{given}}}$.", truth, algebra), given
    for given in same:
        assert check_answer.check_answer(rf"So it is $\boxed{{{given}}}$.", truth, algebra), given


@pytest.mark.parametrize("text, truth", [("2+2", "4"), ("Answer: 57 - 17", "40"), ("The sum is $2+2$ in this case.", "4")])
def test_an_operation_that_is_left_is_no_answer_in_a_text(text, truth):
    assert not check_answer.check_answer(text, truth) and not check_answer.check_answer(text, truth, algebra=True)


@pytest.mark.parametrize("given, truth", UNEQUAL)
def test_not_same_answer(given, truth):
    assert check_answer.comparison(given, truth) is not True
    assert check_answer.comparison(truth, given) is not True


def test_numbers_against_python():
    """Random formulas have the value that Python's own parser gives them, with fractions for numbers."""
    rng = random.Random(0)

    def formula(depth):
        if depth == 0 or rng.random() < 0.2:
            return rng.choice(["2", "3", "7", "10", "0.5", "1.25"])
        left, right, op = formula(depth - 1), formula(depth - 1), rng.choice("+-*/^")
        right = rng.choice("0123") if op == "^" else rng.choice(["", "", "-"]) + right
        text = left + op + right
        return rng.choice([text, f"({text})", f"-{text}", f"{{{text}}}"])

    for _ in range(2000):
        text = formula(4)
        fractions = re.sub(r"[\d.]+", r"Fraction('\g<0>')", text.translate(str.maketrans("{}", "()")))
        try:
            expected = eval(fractions.replace("^", "**"))
        except ZeroDivisionError:
            expected = None
        # Larger powers may stay as they are written.
        if expected is None or max(abs(expected.numerator), expected.denominator) < 2 ** 99:
            assert check_answer.value(text)[0] == expected, text


# A formula may be written in another order, and a text with words in other spellings.
REORDERED = [
    ("ab", "ba"), ("xy", "yx"), ("x y", "y x"), ("2ab", "2ba"), ("2ab", "2 b a"), ("2abc", "2cba"), ("xyz+1", "1+zyx"), ("-abc", "-cba"),
    (r"\frac{mgh}{2}", r"\frac12 hgm"), (r"\frac{nRT}{V}", "nTR/V"), ("kT", "Tk"), ("3kT", "3Tk"), ("GMm", "GmM"), ("αβ", "βα"),
    (r"\alpha\beta", r"\beta\alpha"), (r"\pi r^2", r"r^2 \pi"), ("2 pi r", r"2 r \pi"), (r"\sin x \cos y", r"\cos y \sin x"), ("e^{ikx}", "e^{kxi}"),
    ("v_{final}-v_{initial}", "-v_{initial}+v_{final}"), ("a, b", "b, a"), (r"\{cat, dog\}", r"\{dog, cat\}"), ("{red, blue, green}", "{blue, red, green}"),
    ("length = 5, width = 3", "width = 3, length = 5"), ("3 apples, 5 pears", "5 pears, 3 apples"), ("mass*velocity", "velocity*mass"),
    ("distance / time", r"\frac{distance}{time}"), ("5 m s", "5 m s"), ("NaCl", "NaCl"), ("H_2O", "H_{2}O"), ("abc", "a b c"),
    ("Alice gave Bob", "alice gave  Bob."), ("red, green", "Red, green"), ("ice cream", "Ice-cream"), ("twenty-one", "twenty one"), ("St. Louis", "St Louis"),
    ("Washington, D.C.", "Washington D.C."), ("don't know", "Don't know!"), ("кот", "Кот"), ("élève", "Élève"), ("左右", "左 右"), ("m<3且m≠2", "m<3 且 m≠2"),
    ("Bob has 3 apples and Alice has 2", "bob has 3 apples, and Alice has 2"), (r"\text{New York}", "new york"),
    ("FACE", "face"), ("Bad", "BAD"), ("BC", "CB"), ("May 5, 2024", "may 5 2024"), ("Chapter 3, Verse 16", "chapter 3 verse 16")]
# Words and letters in another order are another text, also for the package for algebra.
PERMUTED = [
    ("Alice gave Bob", "Bob gave Alice"), ("act", "cat"), ("abc", "cba"), ("dog", "god"), ("no", "on"), ("us", "su"), ("He", "eh"), ("Tom", "mot"), ("a b c", "c b a"),
    ("I am in", "in I am"), ("to be", "be to"), ("apple banana cherry date", "banana apple cherry date"), ("yes, no", "no, yes"), ("True, False", "False, True"),
    ("Alice, Bob, Carol", "Carol, Alice, Bob"), ("yes, 5", "5, yes"), ("n mod m", "m mod n"), ("mother-in-law", "mother-law-in"), ("on the left", "left the on"),
    ("Bob has 3 apples and Alice has 2", "Alice has 3 apples and Bob has 2"), ("Bob has 3 apples and Alice has 2", "Bob has 2 apples and Alice has 3"),
    ("the 2 of hearts", "the hearts of 2"), ("4 of hearts", "hearts of 4"), ("North Dakota", "Dakota North"), ("listen", "silent"), ("New York", "Newark York"),
    ("кот", "ток"), ("左右", "右左"), ("甲乙丙", "丙乙甲"), ("élève", "véèle"), ("NaCl", "ClNa"), ("HCN", "CNH"), ("CO", "OC"), ("H2O", "HO2"), ("x before y", "y before x"),
    ("he is 5 and she is 3", "she is 5 and he is 3"), ("odd and even", "even and odd"), ("sun, moon", "nus, moon"), ("2ab", "2ac"), ("ab", "a+b"),
    ("5 m s", "5 s"), ("2 pi r", "2 pi"), ("kT", "k"), ("GMm", "GMM"),
    ("FACE", "CAFE"), ("DAB", "BAD"), ("ABBA", "BABA"), ("AAB", "ABA"), ("B A B", "B B A"), ("U U D", "U D U"), ("X O X", "O X X"), ("May 5, 2024", "May 2024, 5"), ("May 5, 2024", "May 52024")]


@pytest.mark.parametrize("given, truth", REORDERED)
def test_a_formula_has_no_order(given, truth):
    assert check_answer.comparison(given, truth) is True and check_answer.comparison(truth, given) is True


@pytest.mark.parametrize("algebra", [False, True])
@pytest.mark.parametrize("given, truth", PERMUTED)
def test_words_have_an_order(given, truth, algebra):
    for answer, right in ((given, truth), (truth, given)):
        assert not check_answer.check_answer(rf"\boxed{{{answer}}}", right, algebra)
        assert not check_answer.check_answer(f"Answer: {answer}", right, algebra)


def test_of_many_words_only_one_order_is_right():
    rng = random.Random(0)
    words = "the a red cat dog on no Alice Bob Tom is big sun moon rock France Rome blue go up east two of at in".split()
    for _ in range(500):
        order = rng.sample(words, rng.randint(4, 7))
        for joint in (" ", ", ", "; "):
            truth = joint.join(order)
            assert check_answer.check_answer(rf"\boxed{{{truth}}}", truth), truth
            given = joint.join(rng.sample(order, len(order)))
            assert given == truth or not check_answer.check_answer(rf"\boxed{{{given}}}", truth), (given, truth)


N = 100_000


@pytest.mark.parametrize("attack", [
    "9" * N, "1." + "9" * N, "-" * N, "9^" * N + "9", "(" * N, "(" * N + "5" + ")" * N, "{" * N, "}" * N,
    "^{" * N, r"\boxed{" * N, r"\frac{" * N, r"\frac" + " " * N, r"\text{" * N, "Answer:" * N,
    "Answer:\n" * N, "answer" + "*" * N, "#### " * N, "\\" * N, "5" + " " * N + "x", "5" + "." * N + "x",
    "5 " + "a " * N, "1," * N, "1 234" * N, "a=" * N, "(" * 99 + "5" + ")" * 99 + "1", "9^999999999",
    "(2^4000)^4000", "1/7^60+" * 24 + "1", "9^9^9^9", "7^1300*" * 3 + "7^1300", "9^99*" * 98 + "9", "5" + " " * 400 + "x", "-" * 299 + "1", "[" * 299,
    "~" * 490 + "x", "5 (" * 160, "x " * 240 + "=",
    r"\begin{array}{" + "c" * 480, r"\boxed " * N, "9^1290*" * 40 + "9",
    r"\boxed{1}," * N, "<answer>" * N, "final answer is " * N, "Answer: $$" * N, "Answer:" + " since" * N,
    " " * N + "x", "#### A" * N, "<|a" * N, "</think>" * N, "_1" * N,
    "答" * N, "答:" * N, "answer " * N, "answer is " * N, "[[" * N, "İ" * N, "ﷺ" * N, "①" * N,
    "﷽" * 500, "=" * N,
    "x=" * N, "x = 1, y" * N, "so " * N, "so " * 90 + "x", "**" * N, "`" * N, "$$" * N, r"\[" * N, "```" * N,
    "\n$" * N, "A" * N, "A, " * N, "(1)" * N, "(1)" * 30 + "x", "x and " * 80, "5 (" + "a " * 240, "1元" * N,
    "5" + "元" * 400, "She makes " * N + "5", "她" * N + "5", "Answer: " + "a b " * N + "5", "answer\n" * N,
    "Answer: " + "答" * N, "{1," * 90 + "}" * 90, r"\{1," * 60 + r"\}" * 60, "\u200b" * N, "1,\\!" * 120,
    '"answer": ' * N, '{"answer": "' + ",}" * N, "1\\!, " * N, "½" * N, "x\\pm" * 90,
    r"\boxed{" + "{}" * N, r"\boxed{1}" + " " * N + "and", r"\boxed{\{" * N,
    "** a" * N, "a=b" * N, "x_" * 240 + "=",
], ids=lambda attack: f"{attack[:12]!r}x{len(attack)}")
def test_attacks_are_quick_and_wrong(attack):
    def quick(function, *args):
        start = time.process_time()
        result = function(*args)
        assert time.process_time() - start < 1.0
        return result
    for text in (attack, f"Answer: {attack}", rf"\boxed{{{attack}}}"):
        assert not quick(check_answer.check_answer, text, "5")
    assert not quick(check_answer.comparison, attack, "5")
    assert not quick(check_answer.comparison, "5", attack)


@pytest.mark.parametrize("text, truth, right", [
    ("Answer: 0.5", "1/2", True), ("Answer: 2", "1/2", False), ("0.5", "1/2", True),
    (r"\boxed{72}", "Half of 48 is 24.\n#### 72", True),
    (r"\boxed{24}", "Half of 48 is 24.\n#### 72", False),
    ("Answer: B) 12", "B", True), ("Answer: (B) 12", "B", True), ("Answer: B. Paris", "(B)", True),
    (r"\boxed{\textbf{(C)}\ 12}", r"\text{(C)}", True), (r"\boxed{B)}", "B", True),
    ("Answer: B) 12", "C", False),
    ("Answer: (A) and (B)", "A", False), ("Answer: B) or C)", "B", False), ("Answer: (a) b", "a", False),
    ("Answer: 63/400", r"It is $\boxed{\frac{63}{400}}$.", True),
])
def test_check_answer(text, truth, right):
    assert check_answer.check_answer(text, truth) is right


@pytest.mark.parametrize("truth, right", [
    (["4", "5"], True), (["4", r"so \boxed{10/2}"], True), (["4", "6"], False), ([], False), (("5",),
    True), ('["5"]', True), ('[ "5" ]', True), ('["4", "5"]', True), ('["4"]', False), (5, True), ([4, 5.0], True), (6, False)])
def test_one_of_several_truths_is_enough(truth, right):
    assert check_answer.check_answer("Answer: 5", truth) is right
    assert check_answer.check_answer("Answer: 5", truth, algebra=True) is right


@pytest.mark.parametrize("truth, names, others", [(True, ["yes", "True", "Answer: Yes.", r"\boxed{\text{true}}"], ["no", "False", "Answer: 1"]),
                                                  (False, ["no", "False", "Answer: No.", r"\boxed{false}"], ["yes", "True", "Answer: 0"])])
def test_a_truth_value_has_two_names(truth, names, others):
    assert all(check_answer.check_answer(text, truth) for text in names)
    assert not any(check_answer.check_answer(text, truth) for text in others)


def test_a_list_of_numbers_in_a_text_is_an_interval():
    assert check_answer.check_answer("Answer: [2, 7]", "[2, 7]") and not check_answer.check_answer("Answer: 7", "[2, 7]")
    assert check_answer.check_answer('Answer: ["a', '["a')


# A row's answer, the answers that are right, and some that are not
TRUTHS = [
    ("Therefore, he has 7 apples.", ["7", "7 apples"], ["8"]), ("Mr. Smith has 7 apples.", ["7"], []), ("So Mary has 12 more marbles than John.", ["12"], []),
    ("If Jungkook is in 5th place, then 4 people crossed the finish line faster than him.", ["4"], ["5"]),
    ("We write x / 10 = 6.\n\nSo we subtract 15 from 60:\n\n60 - 15 = 45\n\nTherefore, the result Yoongi got is 45.", ["45"], ["15", "60"]),
    ("First, 3 + 9 = 12.\n\nTherefore, there are 12 apples left in the basket.", ["12"], ["9"]),
    ("He had $60 and kept 12.\n\nSo, John spent $48 on toys.", ["48", "$48"], ["12", "48 euros"]),
    ("Therefore, the number of students in the class is 28 + 1 = 29.", ["29"], ["28"]),
    ("Therefore, the average speed of the train is 60 km/hr.", ["60", "60 km/h"], ["60 km"]),
    ("Let's see.\n\nThus, the ratio of A to B is 3:4.", ["3:4"], ["4"]), ("Adding gives 2x = 10.\n\nTherefore, x = 5.", ["5"], ["10"]),
    ("We count.\n\nTherefore, the probability is $\\frac{3}{4}$.", [r"\frac34"], ["4", "3"]), ("Half of 48 is 24.\n#### 5", ["5"], ["24"]),
    ("So there are 25% of the students who like tea in this class of pupils.", ["25%"], []),
    ("We need both.\n\nTherefore, the two numbers are 12 and 16.", [], ["16", "12"]), ("The town has grown, so that it has 5 thousand people now.", [], ["5"]),
    ("The Battle of Hastings took place in the year 1066.", ["1066", "The Battle of Hastings took place in the year 1066"], ["1067"]),
    ("Article 5 of the treaty.", ["Article 5 of the treaty"], ["5"]), ("Apollo 11.", ["Apollo 11"], ["11"]), ("x = 1, y = 2.", ["x=1, y=2"], ["2"]),
    ("\\begin{pmatrix} 1 & 2 \\\\\n 3 & 4 \\end{pmatrix}", [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"], ["4"]),
    ("apple\nbanana\ncherry", ["apple banana cherry"], ["cherry"]), ("No real solutions.", ["no real solutions"], []),
    ("St. Louis", ["St. Louis"], ["St."]), ("Mr. Smith", ["Mr. Smith", "mr smith"], ["Mr."]), ("Dr. No", ["Dr. No"], ["Dr.", "No"]), ("No", ["No. It is not even"], []),
    *[(signs, [signs], ["5", "()("]) for signs in ("→", "([]{})", "()", "[]", "{}", "👍", "<>", "↑↑↓", "-->")],
    ("5%", ["5%", "5", "5 percent", r"5\%"], ["$5", "5 dollars", "5 km", "€5"]), ("$5", ["5", "5 dollars"], ["5%", "5 percent"]), ("1/2", ["50%"], [])]


@pytest.mark.parametrize("form", [r"So it is \boxed{%s}", "Answer: %s", "<answer>%s</answer>", "Reasoning.\n\n**Answer:** %s", "The answer is %s.",
                                  "Answer: %s\nThat is why.", "Final answer:\n%s"])
@pytest.mark.parametrize("truth, right, wrong", TRUTHS)
def test_rows_with_solutions_names_and_signs(truth, right, wrong, form):
    for given in right:
        if "It is" not in given or "boxed" not in form:         # what stands in a box is the whole answer
            assert check_answer.check_answer(form.replace("%s", given), truth), given
    for given in wrong:
        assert not check_answer.check_answer(form.replace("%s", given), truth), given


# Completions that give the answer, and completions that do not: a text that was cut off, or another answer.
PHRASES = {"18": [
    "So the answer is: **18**.", "Therefore, x = 18", r"The final result is \(18\).", "```\n18\n```",
    '{"answer": 18}', "It's 18", "It's 18.", "So it's 18.", "The answer is 18 because 9 * 2 = 18.",
    "The answer is $18.", "The answer is 18. Let me double-check: 9*2=18.", "**Answer:** $18$",
    "**Answer:** 18 dollars", r"**Final Answer:** \(18\)", "## Final Answer\n\n18", "### Answer\n**18**",
    "The result is 18.", "Result: 18", "Ans: 18", "answer = 18", "Answer = 18", "Total = 9 × $2 = $18",
    "x = 18", "$x = 18$", r"\[x = 18\]", "\\[\nx = 18\n\\]", "$$18$$", "So she makes **18 dollars**.",
    "Thus, the total is 18.", "答案是18", "答案为18。", "答案: 18", "因此，答案为：$18$。", "所以她赚了18美元。\n答案：18美元",
    "答えは 18 です。", "答え：18", "正解は18", "정답: 18", "정답은 18입니다.", "답: 18", "La respuesta es 18.",
    "Respuesta final: 18", "La respuesta final es: 18", "La réponse est 18.", "Réponse : 18",
    "Die Antwort ist 18.", "Die Antwort lautet: 18", "Endgültige Antwort: 18", "Ответ — 18",
    "Ответ: 18 долларов", "A resposta é 18.", "Resposta: 18", "La risposta è 18.", "Risposta: 18",
    "उत्तर है 18", "الجواب: 18", "الإجابة هي 18", "Đáp án: 18", "Jawaban: 18", "Cevap: 18", "Odpowiedź: 18",
    "<answer>x = 18</answer>", "<final_answer>18</final_answer>", "[[18]]", "Final answer: [[18]]",
    "{'answer': 18}", r"\text{Answer: 18}", '```json\n{"answer": 18}\n```', '{"reasoning": "9*2", "answer": 18}',
    '{"answer": "18", "confidence": 0.9}', '{"final_answer": 18}', "１８", "18.", "$18", "18 dollars", "18\n",
    "\n\n18", "**18**", "`18`", r"\(18\)", r"\[18\]", "=18", "= 18 dollars", "<think>hm 12</think>18",
    "<think>hm</think>\n\nThe answer is 18.", "The answer: 18", "The correct answer is 18.",
    r"The final answer is $\mathbf{18}$", "The answer is\n18", "The answer is:\n\n$$18$$",
    "Therefore, the answer is 18 dollars per day.", "Hence the answer is 18", "so the answer is 18</s>",
    "Answer: 18\n\nExplanation: 9*2=18", "18 is the answer.", "So 18 is the final answer.",
    "We get x = 18.", "Hence, $n=18$.", "Answer: She makes 18 dollars every day.",
    "Answer: Let's think step by step. She sells 9 eggs at 2 dollars each, so that she earns 9*2 dollars, "
    "and that is. The answer is 18.",
    "I get 18.", "The answer would be 18.", "The value of x is 18.", "Therefore 18.", "∴ x = 18", "=> 18",
    "So the radius must be 18.",
    r"\boxed{x=18}", r"\boxed{18}.", r"The answer is \underline{18}.", "The total is $18$.",
    "Final Answer: 18.", "FINAL ANSWER: 18", "final_answer: 18", "Final answer - 18",
    "The final answer to the question is therefore 18.", "Finally, the answer is thus 18.",
    "The answer is equal to 18.", r"Answer: $\boxed{18}$", r"\[ \text{Total} = 18 \]", "Antwort: 18.",
    "Svar: 18", "Kết quả là 18", "Resultado: 18", "结果是18。", "结果：18", "综上，答案为18.", "故答案为：18．", "故答案为18",
    "答案是：$18$", "最终答案：18", "最终答案是 **18**。", "解：x = 18", "答：18个", "答: 18",
    "The answer is **$18**.", "Answer: **18**", "**Answer: 18**", "So, the final answer is: 18",
    "Final Answer: $18$", "*Answer:* 18", "Answer is 18", "answer is: 18",
    "the answer is 18\n\nQuestion: What is 3+4?\nAnswer the following", "The answer is 18.\n\nQ: How many",
    "#### 18\n\nQ: next", "Answer:18", "Answer:\n\n**18**", "Answer:\n```\n18\n```",
    "The final answer is:\n**18**", "The result is: **18**", "Therefore, the answer is: **18**.",
    "Thus the answer is 18", "18 dollars.", "18.0", "+18", "$18.00", "  18  ", "x=18",
    "Janet makes $18 every day.\n\nAnswer: 18", "So Janet makes 9 * 2 = 18 dollars every day.", "Total: 18",
    "Total: $18", "**Total: 18**", "Hence, the answer is $\\boxed{18}$ dollars.", "最后答案是18", "所以，答案是18美元。",
    "因此最终答案为 $18$", "答案是 18 美元", "【答案】18", "答え: 18ドル", "したがって、答えは18ドルです。", "따라서 정답은 18입니다.",
    "정답은 **18**입니다.", "Por lo tanto, la respuesta es 18.", "La respuesta final es **18**.",
    "Donc, la réponse est 18.", "La réponse finale est : 18", "Die endgültige Antwort ist 18.",
    "Итак, ответ: 18.", "Окончательный ответ: 18", "Portanto, a resposta é 18.", "A resposta final é 18.",
    "Quindi la risposta è 18.", "अंतिम उत्तर: 18", "الجواب النهائي: 18", "الجواب هو 18",
    "<answer>18</answer>\n", "<answer>\n18\n</answer>", "<answer>The answer is 18</answer>",
    "<answer>\\boxed{18}</answer>", "<answer>**18**</answer>", "<solution>\n18\n</solution>", "[[18]].",
    "```\nAnswer: 18\n```", "$\\text{Answer} = 18$", "\\boxed{ 18 }", "\\boxed{$18$}", "\\boxed{\\$18}",
    "$\\boxed{18}$.", "\\fbox{18}", "\\boxed{18 \\, \\text{dollars}}", "\\boxed{x = 18}",
    "\\boxed{\\text{18}}", "\\boxed{18}\\", "ANS = 18", "answer -> 18", "Answer → 18", "Answer — 18",
    "Solution: 18", "Respuesta = 18", "RESPUESTA: 18", "Réponse: **18**", "**Respuesta:** 18", "**答案：18**",
    "**答案：** 18", "答案：\n18", "答案：\\(18\\)", "### 答案\n18", "**정답:** 18", "**Ответ:** 18", "**Antwort:** 18",
    "Das Ergebnis ist 18.", "El resultado es 18.", "Le résultat est 18.", "O resultado é 18.",
    "Il risultato è 18.", "Результат: 18", "따라서 18입니다.", "所以是18。", "等于18。", "= $18$",
], "B": [
    "Option B is correct.", "Option B is correct", "The correct option is (B).", "The answer is B.",
    "The answer is (B) 12.", "Answer: (B)", "answer: b", "**Answer:** B) 18",
    "The correct answer is B) 18.", "The correct choice is B", "选B", "选B。", "应选B", "故选：B", "故选：B．", "答案选B",
    "答案为B", "答案是B。", "所以选择B。", "正确答案是B", "正确答案：B", "정답은 B입니다.", "답은 B", "答えはBです。", "答えは(B)です", "正解：B",
    "La respuesta correcta es B.", "La bonne réponse est B.", "Die richtige Antwort ist B.",
    "Правильный ответ: B", "(B)", "B", "B.", "B)", "**(B)**", "**B) 12**", "B) 12", r"\boxed{B}",
    r"$\boxed{\text{B}}$", "<answer>B</answer>", "[[B]]", "I choose B.", "The answer is option B.",
    "So the answer is **B**.", "Therefore, option B", "The best answer is B.",
    "Thus, the correct option is **B) 18**.", "B is the correct answer.", "B is correct.", "选项B正确",
    "Answer: Option B", "The correct answer is B because 9*2=18.", "**B. 18**",
    "答案选B。", "本题选B", "故本题答案为B.", "故答案选B", "【答案】B", "因此选择B选项。", "正确选项是B", "正确选项为：B。", "정답: B", "정답은 (B)입니다",
    "答え: B", "The correct answer is option B.", "Correct answer: B", "Answer: **B**", "Answer: B",
    "ANSWER: B", "The answer is **B**.", "The answer is (B).", "**The correct option is B.**",
    "The correct option is: **B**", "The right answer is B.", "My answer is B.", "I would choose B",
    "Choice B", "(B) 18", "B: 18", "\\boxed{B. 12}", "\\boxed{(B)}", "\\boxed{\\text{(B) }12}",
    "\\boxed{\\mathrm{B}}", "\\textbf{(B)}", "$\\textbf{(B)}$",
    "Therefore, the correct answer is **B) 12**.", "Thus the answer is $\\boxed{B}$.",
    "La opción correcta es B.", "La respuesta es la B.", "Die richtige Option ist B.",
    "Правильный вариант: B", "A resposta correta é a letra B.", "Option (B) is correct.", "Option B.",
    "Answer is B", "The best option is B.", "The answer should be B.", "Lösung: B",
    "The answer comes out to be B.",
], "7": [
    "So he has 7 apples left.", "He had 9 apples. He has 7 apples left.", "She makes 7 dollars.", "She makes $7 per day.",
    "I have $7.", "The train takes 7.0 hours.", "They need 7 more buses!", "Tom is 7 years old.", "他有7个苹果。",
    "He ate 2 of them.\nSo he has 7 apples left.", "Therefore, he has 7 apples.", "Mr. Smith has 7 apples.", "The discount is 7%.",
], "LATER": ["The answer is LATER.", "Answer: LATER"]}
NO_PHRASES = {"18": [
    "She has 18 eggs and then", "First, 18 eggs are", "The number 18 is", "Let x = 18", "Suppose x = 18",
    "We have 18 eggs, so next", "Step 1: 16 + 2", "We divide by 18 and", "2x = 18", "So 18 - 3 is",
    "18 or 19", "Answer: not 18", "Answer: 18 or 19", "The answer is not 18.", "the answer is 18 + 2",
    "If the answer is 18, then", "x = 18, y = 2", "Answer: 18, 19", "<think>18", "18, then 20",
    "1. First 18", "Answer: at least 18", "The answer is about 18.3", "Answer: 18 million", "She makes 18",
    "She makes 18 dollars", "She makes at least 18 dollars.", "She needs 18 apples and 3 pears.", "I cannot solve problem 18.",
    "Let her have 18 apples.", "She makes 18 million dollars.", "It takes 18 to 20 hours.", "Are there 18 apples?",
    "It isn't 18 dollars.", "She has no 18 dollars.", "It cannot be 18 dollars.", "She pays twice 18 dollars.",
    "It increases from 18 km.",
], "B": [
    "A or B", "Let's consider option B and", "Option A is correct", "A and B", "B or C",
    "The answer is A, not B", "Both A and B are correct.", "Beta",
]}


@pytest.mark.parametrize("truth, text", [(truth, text) for truth, texts in PHRASES.items() for text in texts])
def test_phrases(truth, text):
    assert check_answer.check_answer(text, truth)


@pytest.mark.parametrize("truth, text", [
    (truth, text) for truth, texts in NO_PHRASES.items() for text in texts])
def test_phrases_without_the_answer(truth, text):
    assert not check_answer.check_answer(text, truth)


def test_another_language_is_a_line():
    """Every line of the table has words that announce an answer."""
    for row in check_answer.LANGUAGES:
        noun, verb, so = (words.split("|")[0].removesuffix("[是为]?") for words in row)
        assert check_answer.extract_answer(f"{noun}: 18") == "18", noun
        assert check_answer.extract_answer(f"{so} 18") == "18", so
        assert check_answer.extract_answer(f"{noun} {verb} 18") == "18", noun


# The row's answer, and what is in the box.
SPELLINGS = [
    (r"\{x|-3<x<4\}", r"\{x \mid -3<x<4\}"), (r"\{x|x>3\}", r"\left\{ x \mid x > 3 \right\}"),
    (r"$[2,+\infty)$", r"[2, \infty)"), (r"(-\infty,-1)\cup(1,+\infty)", "(−∞, −1) ∪ (1, ∞)"),
    ("9 (apples)", "9"), ("12元", "12"), ("12", "12个"), ("12", "12 元"), ("18", "18美元"), ("1;2", "1; 2"),
    ("1；2", "1; 2"), (r"30^\circ", "30°"), ("12\u200b", "12"), ("1\xa0234", "1234"), (r"1,\!234", "1,234"),
    ("1,234", "1{,}234"), (r"11,\,111", "11111"), (r"11\,111", "11111"), (r"11,\;111", "11111"),
    ("12", "１２"), ("-3", "－３"), ("(1,2)", "（1，2）"), ("12%", "12％"), (r"\frac{1}{2}", "½"),
    (r"2\sqrt{3}", "2√3"), (r"2\sqrt{3}", r"2 \sqrt 3"), ("x^2", "x²"), ("x^2+1", "x²+1"), ("A", "(A)"),
    ("A", "A."), ("A", r"\text{A}"), ("D. 5", "D"), ("D", "D. 5"), ("D", "D：5"), ("ABD", "A, B, D"),
    ("ABD", "A、B、D"), ("A, C", "AC"), ("AB", "A and B"), (r"\text{yes}", "Yes"), (r"\text{Yes}", "yes."),
    ("Friday", r"\text{Friday}"), ("even", r"\textbf{even}"), ("3:2", "3/2"), ("3:2", "3 : 2"),
    ("1,2,3", "1, 2 and 3"), ("1, 2", r"2 \text{ and } 1"), ("2, 3", "2 or 3"), (r"\{1,2\}", r"\{2, 1\}"),
    (r"\{1,2\}", "{1,2}"), (r"\pm 2", "2, -2"), (r"\pm 2", "-2, 2"), ("3.5", "7/2"),
    (r"3\frac{1}{2}", "3.5"), ("0.5", ".5"), ("0.5", "0.50"), ("1000", "10^3"), ("1000", "1,000"),
    (r"3\times 10^8", "3e8"), (r"6.02\times10^{23}", "6.02 × 10²³"), (r"1.5\times10^{-6}", "1.5 x 10^{-6}"),
    (r"5\text{ cm}", "5 centimeters"), (r"5\text{ cm}^2", "5 cm²"), ("5 m/s", r"5 \text{ m/s}"),
    (r"50\text{ km/h}", "50"), ("x=3", "3"), ("3", "x = 3"), ("x = 3", "x=3.0"), ("y = 2x + 1", "2x+1"),
    (r"x \leq 5", "x ≤ 5"), (r"x \neq 0", "x ≠ 0"), (r"x\ge2", "x ⩾ 2"), (r"2 < x \le 5", "2<x≤5"),
    ("[1,2]", r"\left[1, 2\right]"), ("(1,2]", "$(1,2]$"), (r"\frac{\pi}{3}", "π/3"),
    (r"\frac{\pi}{3}", r"\pi / 3"), (r"2\pi", "2π"), ("e^{2}", "e^2"), (r"\log_2 3", r"\log_{2} 3"),
    (r"\ln 2", "ln 2"), (r"\mathbb{R}", "ℝ"), (r"\emptyset", "∅"), (r"\infty", "∞"), (r"-\infty", "−∞"),
    (r"1-5\mathrm{i}", "1-5i"), (r"\$5.50", "5.5"), (r"\$5", "$5"), ("5 dollars", "5"), ("€5", "5"),
    ("¥12", "12"), (r"25\%", "25"), ("25 percent", "25%"), (r"\frac{3}{4}", "3/4"), (r"\frac34", "0.75"),
    (r"-\frac{3}{4}", r"\frac{-3}{4}"), ("①③", "(1)(3)"), ("①③", "①, ③"), ("(2)(3)", "②③"),
    ("2^{10}", "1024"), ("x_1", "x_{1}"), ("x₁", "x_1"), ("(3, -1)", "(3,−1)"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"), (r"\boxed{5}", "5"),
    (r"\boxed{\text{B}}", "B"), ("No solution", r"\text{no solution}"), ("12.0", "12"), ("073", "73"),
    ("10", r"10 \text{ units}"), ("5", "5 (five)"), ("5", "5 hours"), ("3 hours", r"3\text{ h}"),
    ("18", "18 dollars"), ("18", "$18.00"), ("5", r"\mathbf{5}"), ("5", "**5**"), ("5", "5."), ("5", "5。"),
    ("5", '"5"'), ("5", "05"), ("x+1", "x + 1"), ("x^2-1", "x^{2} - 1"), ("3a+2b", "3a + 2b"),
    ("m>2", "m > 2"), ("m<3且m≠2", "m<3 且 m≠2"), ("1或2", "1 或 2"), ("-1或3", "-1, 3"), ("$-1$或$3$", "-1, 3"),
    (r"$\frac{1}{2}$", "1/2"), ("$5$，$10$", "5, 10"), ("5，10", "5, 10"), (r"$\{2,3\}$", r"\{2, 3\}"),
    ("$(0,1)$", "(0, 1)"), (r"$3\sqrt{2}$", "3√2"), ("y=x+1", "y = x + 1"),
    ("$x^2+y^2=1$", "x^2 + y^2 = 1"), ("27/4", "6.75"), (r"60\text{ mph}", "60 miles per hour"),
    ("10 km/h", "10 kilometers per hour"), ("1+2i", r"1+2\mathrm{i}"), ("100", r"1.00 \times 10^2"),
    ("Saturday", "saturday"), ("$1,000", "1000"), (r"\frac{11}{36}", r"\dfrac{11}{36}"),
    (r"3\pi\text{ cm}^3", r"3\pi"), (r"\sqrt{2}/2", r"\frac{\sqrt{2}}{2}"),
    (r"8 \text{ square units}", "8"), (r"5\sqrt{2} \text{ units}", r"5\sqrt{2}"), ("7", "7個"), ("7", "7개"),
    ("7", "7 kg"), (r"-\sqrt{3}", "−√3"), ("2:3:4", "2 : 3 : 4"), (r"5 \mathrm{~cm}", "5"),
    ("1 000 000", "1000000"), ("x=1, y=2", "x = 1, y = 2"), ("x=1, y=2", "x=1 and y=2"),
    ("(x-1)(x+2)", "(x - 1)(x + 2)"), ("12", "B. 12"), ("1.5", "(C) 3/2"), ("(2)(3)", "2, 3"),
]
NO_SPELLINGS = [
    ("7", "7万"), ("7", "7千"), ("7", "7百"), ("5; 10", "10; 5"), ("M", "m"), ("m", "M"),
    ("10 mph", "10 km/h"), ("10 mph", r"10\text{ km/h}"), ("5 cm", "5 m"), ("5厘米", "5米"), ("5米", "5千米"),
    ("(1,2)", "(2,1)"), ("BC", "BCD"), ("BC", "B"), ("(1)(3)(4)", "12"), ("(2)(3)", "6"), ("①③", "13"),
    ("①③", "①④"), ("x²", "x2"), ("x²", "x"), ("1½", "11/2"), ("1½", "1/2"), ("1:9", "9:1"), ("1:2", "12"),
    (r"\{1,2\}", r"\{1,3\}"), (r"\{1,2\}", "(1,2)"), ("[1,2)", "(1,2]"), (r"\{x|x>3\}", r"\{x|x<3\}"),
    (r"\pm 2", "2"), (r"\pm 2", "-2"), ("3, 5", "3"), ("3", "3, 5"), ("3", "3 or 5"), ("3", "3以上"),
    ("3", "3未満"), ("3", "3倍以上"), ("C. 5", "D. 5"), ("C", "D. 5"), ("C", "B, C"), ("C", "C or D"),
    ("C", "not C"), ("C. 5", "B"), ("x ≥ 2", "x > 2"), ("x>2", "x<2"), ("x+1", "x-1"), ("1-5i", "1+5i"),
    ("12", "1.2"), ("12", "1,2"), ("12%", "0.12%"), ("1000", "10^4"), ("1,234", "1234.5"),
    (r"5\text{ J}", r"5\text{ N}"), ("5 dollars", "5 euros"), ("2", "2 dozen"), ("2", "2 million"),
    ("2", "两"), ("x = 2", "y = 2"), ("x=1, y=2", "x=2, y=1"), ("1234", "12 34"), ("11, 111", "11111"),
    ("82, 456", "82456"), (r"1,\! 23", "123"), ("5", "5x"), ("90°", "90 radians?"), ("3/2", "2/3"),
    ("3:2", "3.2"), (r"2\sqrt3", r"3\sqrt2"), ("12:30", "12:03"), ("x<1 or x>2", "x<1 and x>2"),
    ("9 (apples)", "9 - apples"), ("9", "9 (10)"),
]


@pytest.mark.parametrize("truth, given", SPELLINGS)
def test_spellings(truth, given):
    assert check_answer.check_answer(rf"So it is $\boxed{{{given}}}$.", truth)


@pytest.mark.parametrize("truth, given", NO_SPELLINGS)
def test_not_a_spelling(truth, given):
    assert not check_answer.check_answer(rf"So it is $\boxed{{{given}}}$.", truth)
    assert not check_answer.check_answer(rf"So it is $\boxed{{{truth}}}$.", given)


def test_the_comparison_of_the_page():
    """What docs/rewards.md says of this verifier, on pairs that it was not made for."""
    lines = [line.split(" ### ") for line in answers.PAIRS]
    assert len(lines) == len({tuple(line) for line in lines}) == 100
    assert sum(check_answer.check_answer(right, truth) for truth, right, _ in lines) == 93
    assert sum(check_answer.check_answer(wrong, truth) for truth, _, wrong in lines) == 0


# ------------------------------------------------------------------------------------------------ algebra


@pytest.mark.parametrize("given, truth", [
    ("(x+1)^2", "x^2+2x+1"), (r"\sqrt8", r"2\sqrt{2}"),
    (r"\frac{3}{2\sqrt3}", r"\frac{\sqrt{3}}{2}"),
    (r"(1,\infty)\cup(-\infty,-1)", r"(-\infty,-1)\cup(1,\infty)"),
    ("3 < x", "x > 3"), (r"(3,\infty)", "x > 3"),
    ("$x=3$ or $x=-3$", "-3,3"),
    (r"\sqrt{12}\text{ cm}", r"2\sqrt3\text{ cm}"), ("120", "5!"),
])
def test_algebra_makes_equal(given, truth):
    assert check_answer.comparison(given, truth) is None
    assert check_answer.check_answer(rf"It is \boxed{{{given}}}.", truth) is False
    assert check_answer.check_answer(rf"It is \boxed{{{given}}}.", truth, algebra=True) is True


@pytest.mark.parametrize("given, truth", [
    # In the first rows math-verify alone says yes.
    ("0.333333", "1/3"), ("3.605551", r"\sqrt{13}"), ("3.141593", r"\pi"),
    (r"3.2\times10^{-18}", r"3.2\times10^{-19}"),
    ("5 m", "5 cm"), ("2516_7", "2516_8"), ("(1,2,3)", r"\{1,2,3\}"), ("[3,-4]", "(3,-4)"),
    (r"2\mathbf{i}+3\mathbf{j}", r"2\mathbf{i}-3\mathbf{j}"),
    (r"5\text{ hours }20\text{ minutes}", r"5\text{ hours }30\text{ minutes}"),
    ("x-1", "x+1"), ("3-4i", "3+4i"), (r"\{1,2\}", r"\{1,2,3\}"), ("3", r"\pm 3"), ("2", "2, 3"),
    ("(1,2]", "[1,2)"),
    ("x < 3", "x > 3"), (r"x \ge 3", "x > 3"), ("y=4", "x=4"), ("500\\%", "0.5"),
    (r"\text{odd}", r"\text{even}"),
    (r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"), ("528", "52_8"),
    # It would read only a part of these.
    (r"1+\frac{1}{\mathrm{e}}", r"1-\frac{1}{\mathrm{e}}"), (r"1, 2, \ldots, n", r"1, 3, \ldots, n"), ("1+2+...+n", "1+3+...+n"),
    (r"2k, k\in\mathbb{Z}", r"2k+1, k\in\mathbb{Z}"), (r"x\equiv 1 \pmod 3", r"x\equiv 2 \pmod 3"), ("f'(x)=2x", "f(x)=2x"),
    ("f^{-1}(x)=2x", "f(x)=2x"), ("A^T", "A"), (r"\frac{dy}{dx}", r"\frac{dx}{dy}"), (r"0.\overline{3}", r"0.\overline{4}"),
    (r"\begin{cases}x+1&x>0\\0&x\le0\end{cases}", r"\begin{cases}x+2&x>0\\0&x\le0\end{cases}"),
    (r"x<1\text{ or }x>3", r"x<1\text{ and }x>3"),
])
def test_algebra_does_not_make_equal(given, truth):
    assert check_answer.check_answer(rf"It is \boxed{{{given}}}.", truth, algebra=True) is False


def test_algebra_finds_an_answer_that_is_not_marked():
    text = "Both roots coincide at $5$ in this case."
    assert check_answer.check_answer(text, "5", algebra=True)
    assert not check_answer.check_answer(text, "6", algebra=True)
    assert not check_answer.check_answer(text, "5")


def test_algebra_leaves_other_alarms_alone():
    def rings(*_):
        raise AssertionError("rung")

    before = signal.signal(signal.SIGALRM, rings)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000)
        assert check_answer.check_answer(r"\boxed{(x+1)^2}", "x^2+2x+1", algebra=True)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900 and signal.getsignal(signal.SIGALRM) is rings
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_comparison_that_hangs_costs_only_its_completion():
    rows = [{"prompt": "p", "answer": "x^2+2x+1"}] * 3
    completions = [r"\boxed{(x+1)^2}", r"\boxed{(10^7)!}", r"\boxed{(x+1)^2}"]
    start = time.monotonic()
    scores = found(in_process("math_verify"), rows, completions, 2.0)
    assert time.monotonic() - start < 60
    assert [problem for *_, problem, _ in scores] == ["", "the reward took too long (call_timeout)", ""]
    assert [parts["math_verify"] for parts, *_ in scores] == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)


def test_math_verify_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match="reward: math_verify raised ModuleNotFoundError"):
        user_rewards.load_reward("math_verify")
