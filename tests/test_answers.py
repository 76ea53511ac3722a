"""Tables of what the answer checker must say, and of what must not make it slow."""
import time

import pytest

import answers
import rewards


@pytest.mark.parametrize("text, answer", [
    (r"so \boxed{5}", "5"), (r"\boxed {5}.", "5"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\boxed{5}}", "5"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{5} \boxed{6", "5"), (r"\boxed{5", None), (r"\boxed{}", None), (r"} \boxed{5}", "5"),
    (r"\boxed{[1, \}}", r"[1, \}"),
    (r"\boxed{5}{6}", "5"), (r"{ \boxed{5}", "5"), (r"{a}", None),
    ("Answer: 5", "5"), ("answer:5\nmore", "5"), ("The final ANSWER: 5 cm\n", "5 cm"), ("**Answer:** 5", "5"),
    ("**Answer**: 5", "5"), ("**Answer: 5**", "5"), ("Answer: 5\nAnswer: 6", "6"),
    ("Answer: 5\nAnswer:\n", "5"),
    ("Answer:\n5", "5"), ("The answer is 5", None), ("5", None), ("", None),
    ("#### 72", "72"), ("####72\n", "72"), ("#### 1\n#### 2", "2"), ("##### 5", None), ("### 5", None),
    ("#### Answer: 5", "5"), (r"Answer: $\boxed{5}$", "5"), (r"\boxed{5} Answer: 6", "5"),
    (r"Answer: 6 or \boxed{5}", "5"), ("Answer: 6\n#### 5", "5"), ("#### 5\nAnswer: 6", "6"),
    ("Answer: `5`", "5"), ("Answer: {5}", "{5}"), ("Answer: 5\r\nok", "5"),
])
def test_extract_answer(text, answer):
    assert answers.extract_answer(text) == answer


EQUAL = [
    ("5", "5"), ("+3", "3"), ("−3", "-3"), ("- 5", "-5"), ("007", "7"), ("(5)", "5"), ("5 ", " 5"),
    ("1/2", "0.5"), ("2/4", "1/2"), ("6/3", "2"), (r"\frac{1}{2}", "1/2"), (r"\dfrac{1}{2}", ".5"),
    (r"\tfrac{2}{4}", "1/2"),
    (r"-\frac12", "-0.5"), (r"\frac{-1}{2}", "-1/2"), (r"\frac 1 2", "0.5"), ("−1/2", "-0.5"),
    ("1 1/2", "3/2"), (r"1\frac{1}{2}", "1.5"), (r"-1\frac12", "-3/2"),
    ("0.50", "1/2"), (".5", "0.5"), ("5.", "5"), ("5.0", "5"), ("0.1", "1/10"),
    ("1,234", "1234"), ("-1,234", "-1234"), ("1{,}234", "1234"), (r"1\,234", "1234"), (r"1\!,234", "1234"),
    ("1 234", "1234"),
    ("1,234,567.5", "1234567.5"),
    ("50%", "50"), (r"50\%", "50"), ("20%", "20 percent"), ("$5", "5"), (r"\$5", "5"), ("£5", "5"),
    ("€5", "5"),
    ("$1,234.50", "1234.5"), (r"$\$5$", "5"), ("5 dollars.", "5"),
    ("5 apples", "5"), ("5 cm", "5"), ("5cm", "5"), (r"5\text{ cm}", "5"), (r"5\ \text{m}", "5"),
    ("5~kg", "5"), ("5 m", "5"),
    ("12 m^2", "12"), ("12 cm^{2}", "12"), (r"12\text{ cm}^2", "12"), ("60 km/h", "60"),
    ("60 miles per hour", "60"),
    ("3/4 cups", "0.75"), (r"\frac{3}{4}\text{ cups}", "3/4"),
    ("90°", "90"), (r"90^\circ", "90"), (r"90^{\circ}", "90"), ("90 degrees", "90"),
    ("x = 5", "5"), ("x=5", "x = 5"), ("y=2x+3", "2x+3"), ("$x=5$", "5"), ("$5$", "5"), (r"\(5\)", "5"),
    (r"\[5\]", "5"),
    ("2*3", "6"), ("-2+3", "1"), (r"3\cdot 4", "12"), ("3×4", "12"), ("2^3", "8"), ("2**3", "8"),
    ("2^{3}", "8"), ("2^-1", "0.5"), ("-2^2", "-4"),
    ("2^3^2", "512"), ("8-3-2", "3"), ("8/4/2", "1"), ("2+3*4", "14"), ("(2+3)*4", "20"), ("2*-3", "-6"),
    (r"2\times 10^3", "2000"), (r"6 \div 3", "2"), ("6÷3", "2"),
    ("Paris", "paris."), ("(1, 2)", "(1,2)"), (r"\left(3,4\right)", "(3,4)"), (r"\text{A}", "A"),
    ("1,2", "1, 2"),
    (r"\frac{\sqrt{3}}{2}", r"\dfrac{\sqrt{3}}{2}"), ("3 : 4", "3:4"), ("2(3)", "2 (3)"),
    (r"\mathbf{x}", "x"),
]
UNEQUAL = [
    ("5", "6"), ("5", "-5"), ("5", "5.0000001"), ("0.333", "1/3"), ("50%", "1/2"), ("10^2", "102"),
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
    ("5e0", "5"), ("0x5", "5"), ("1_0", "10"), ("inf", "nan"), ("abs(-5)", "5"), ("int('5')", "5"),
    ("__import__('os')", "5"),
    ("9^9^9^9", "5"), ("2^5000", "5"), ("5", "x=6"),
]


@pytest.mark.parametrize("given, truth", EQUAL)
def test_same_answer(given, truth):
    assert answers.same_answer(given, truth) is True and answers.same_answer(truth, given) is True


@pytest.mark.parametrize("given, truth", UNEQUAL)
def test_not_same_answer(given, truth):
    assert answers.same_answer(given, truth) is False and answers.same_answer(truth, given) is False


N = 100_000


@pytest.mark.parametrize("attack", [
    "9" * N, "1." + "9" * N, "-" * N, "9^" * N + "9", "(" * N, "(" * N + "5" + ")" * N, "{" * N, "}" * N,
    "^{" * N, r"\boxed{" * N, r"\frac{" * N, r"\frac" + " " * N, r"\text{" * N, "Answer:" * N,
    "Answer:\n" * N, "answer" + "*" * N, "#### " * N, "\\" * N, "5" + " " * N + "x", "5" + "." * N + "x",
    "5 " + "a " * N, "1," * N, "1 234" * N, "a=" * N, "(" * 99 + "5" + ")" * 99 + "1", "9^999999999",
    "(2^4000)^4000", "1/7^60+" * 24 + "1", "9^9^9^9", "5" + " " * 400 + "x",
], ids=lambda attack: f"{attack[:12]!r}x{len(attack)}")
def test_attacks_are_quick_and_wrong(attack):
    def quick(function, *args):
        start = time.process_time()
        result = function(*args)
        assert time.process_time() - start < 1.0
        return result
    for text in (attack, f"Answer: {attack}", rf"\boxed{{{attack}}}"):
        assert not quick(answers.check_answer, text, "5")
    assert not quick(answers.same_answer, attack, "5") and not quick(answers.same_answer, "5", attack)
    assert quick(rewards.countdown, ["p"], [f"Answer: {attack}"], [[5]], [5]) == [0.0]


@pytest.mark.parametrize("text, truth, right", [
    ("Answer: 0.5", "1/2", True), ("Answer: 2", "1/2", False), ("0.5", "1/2", False),
    (r"\boxed{72}", "Half of 48 is 24.\n#### 72", True), (r"\boxed{24}", "Half of 48 is 24.\n#### 72", False),
    ("Answer: 63/400", r"It is $\boxed{\frac{63}{400}}$.", True),
])
def test_check_answer(text, truth, right):
    assert answers.check_answer(text, truth) is right
