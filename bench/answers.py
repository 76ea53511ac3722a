r"""
Compare the verifier with math-verify, on 200 pairs of a truth and a completion.

    python -m bench.answers         # -v shows the pairs that a verifier gets wrong

Each line has a truth, a completion that gives it, and one that only seems to. The lines were written before
either verifier had seen them, and no verifier was changed because of one. math-verify alone gets the answer that
tasks/check_answer.py finds in a completion, because it looks for few signs of an answer itself.
"""
import sys
import time

from tasks.check_answer import check_answer, extract_answer, parsed

PAIRS = r"""
42 ### Adding both parts we get 42. The answer is 42. ### Adding both parts we get 42. The answer is 24.
3/8 ### The probability is $\boxed{\frac{3}{8}}$. ### The probability is $\boxed{\frac{8}{3}}$.
0.375 ### So it is \boxed{3/8}. ### So it is \boxed{0.38}.
56 ### Tom has 56 marbles left. ### Tom had 65 marbles and has lost some of them.
127 ### **Answer:** 127 ### **Answer:** 64+63
12 ### There are 3 rows of 4 chairs, so there are 3*4 = 12 chairs. ### There are 3 rows of 4 chairs. Answer: 3*4
1/3 ### $x=\boxed{\dfrac{1}{3}}$ ### $x=\boxed{0.33}$
2\sqrt{5} ### The distance is $\boxed{2\sqrt{5}}$. ### The distance is $\boxed{5\sqrt{2}}$.
\frac{\sqrt{2}}{2} ### $\boxed{\frac{1}{\sqrt{2}}}$ ### $\boxed{\frac{\sqrt{3}}{2}}$
(2,-3) ### The vertex is $\boxed{(2, -3)}$. ### The vertex is $\boxed{(-3, 2)}$.
x=-1 ### Solving gives \boxed{-1}. ### Solving gives \boxed{y=-1}.
-\frac{7}{4} ### Final answer: -1.75 ### Final answer: 1.75
75\% ### The share is \boxed{75\%}. ### The share is \boxed{7.5\%}.
\frac{3}{4} ### The chance is \boxed{75\%}. ### The chance is \boxed{0.75\%}.
D ### The correct option is D. ### The correct option is D or E.
C ### Answer: (C) 48 ### Answer: (B) 48
A ### <answer>A</answer> ### <answer>A and C</answer>
B ### \boxed{\text{B. } x^2} ### \boxed{\text{A. } x^2}
6x^2+x-2 ### $\boxed{x+6x^2-2}$ ### $\boxed{6x^2-x-2}$
(x-3)(x+5) ### $\boxed{(x+5)(x-3)}$ ### $\boxed{(x+3)(x-5)}$
x^2-9 ### $\boxed{(x-3)(x+3)}$ ### $\boxed{(x-3)^2}$
y=\frac{1}{2}x+4 ### $\boxed{y = 0.5x + 4}$ ### $\boxed{y = 2x + 4}$
[0, 5) ### $\boxed{[0,5)}$ ### $\boxed{(0,5]}$
(-\infty, 2)\cup(4, \infty) ### $\boxed{(-\infty,2) \cup (4,+\infty)}$ ### $\boxed{(2,4)}$
x \ge 7 ### $\boxed{[7, \infty)}$ ### $\boxed{(7, \infty)}$
\{1, 4, 9\} ### The set is $\boxed{\{9, 4, 1\}}$. ### The set is $\boxed{\{1, 4\}}$.
2, 5 ### $x = \boxed{2}$ or $x = \boxed{5}$ ### $x = \boxed{2}$, so $x \neq 5$
-2, 3 ### The roots are $\boxed{3 \text{ and } -2}$. ### The roots are $\boxed{-3 \text{ and } 2}$.
\pm 6 ### $\boxed{6, -6}$ ### $\boxed{6}$
3+4i ### $\boxed{4i+3}$ ### $\boxed{3-4i}$
15\pi ### The area is $\boxed{15\pi \text{ cm}^2}$. ### The area is $\boxed{15}$ cm$^2$.
24 ### The perimeter is $\boxed{24\text{ cm}}$. ### The perimeter is $\boxed{24\pi\text{ cm}}$.
5 km ### She walked \boxed{5\text{ kilometers}}. ### She walked \boxed{5\text{ miles}}.
30^\circ ### The angle is \boxed{30^{\circ}}. ### The angle is \boxed{30'}.
60 ### The speed is 60 mph. ### The speed is 60.5 mph.
$4.50 ### Each ticket costs $4.50. ### Each ticket costs $450.
1,250 ### Answer: 1250 ### Answer: 1,25
3600000 ### $\boxed{3.6 \times 10^6}$ ### $\boxed{3.6 \times 10^5}$
4.5\times10^{-3} ### $\boxed{0.0045}$ ### $\boxed{0.045}$
2^{20} ### $\boxed{1048576}$ ### $\boxed{2^{10}}$
1024 ### $\boxed{1{,}024}$ ### $\boxed{2^{10}}$
7/12 ### $\boxed{\frac{7}{12}}$ ### $\boxed{\frac13+\frac14}$
9 ### #### 9 ### #### 81^{1/2}
8 ### $$x = 8$$ ### $$x = 18$$
11 ### I get 11. ### I get 11 or 12.
0 ### The limit is $\boxed{0}$. ### The limit is $\boxed{\infty}$.
e^2 ### $\boxed{e^{2}}$ ### $\boxed{2e}$
\ln 3 ### $\boxed{\ln(3)}$ ### $\boxed{\log_{10} 3}$
\frac{\pi}{6} ### $\boxed{\pi/6}$ ### $\boxed{30\pi}$
\frac{2\pi}{3} ### $\theta=\boxed{\frac{2}{3}\pi}$ ### $\theta=\boxed{\frac{3\pi}{2}}$
\sin x ### $\boxed{\sin(x)}$ ### $\boxed{\cos x}$
2\cos(2x) ### $f'(x)=\boxed{2\cos 2x}$ ### $f'(x)=\boxed{\cos 2x}$
\frac{x^3}{3}+C ### $\boxed{\frac{1}{3}x^3 + C}$ ### $\boxed{3x^3+C}$
\begin{pmatrix} 2 & 0 \\ 1 & 3 \end{pmatrix} ### $\boxed{\begin{bmatrix}2&0\\1&3\end{bmatrix}}$ ### $\boxed{\begin{bmatrix}2&1\\0&3\end{bmatrix}}$
\begin{pmatrix} -1 \\ 4 \end{pmatrix} ### $\boxed{\begin{pmatrix}-1\\4\end{pmatrix}}$ ### $\boxed{\begin{pmatrix}4\\-1\end{pmatrix}}$
2:3 ### The ratio is \boxed{2:3}. ### The ratio is \boxed{3:2}.
3:45 ### They meet at \boxed{3:45}. ### They meet at \boxed{3:54}.
2019-07-04 ### \boxed{2019-07-04} ### \boxed{2019-04-07}
15-20 ### The range is \boxed{15-20}. ### The range is \boxed{20-25}.
1,000,000 ### A total of \boxed{1 000 000}. ### A total of \boxed{100,000}.
18 years ### She is \boxed{18}. ### She is \boxed{18\text{ months}}.
4 1/2 ### $\boxed{4\frac{1}{2}}$ ### $\boxed{\frac{41}{2}}$
2.5 ### \boxed{2\frac{1}{2}} ### \boxed{\frac{2}{5}}
-5 ### The minimum is $\boxed{-5}$. ### The minimum is $\boxed{- (-5)}$.
101_2 ### $\boxed{101_{2}}$ ### $\boxed{101_{3}}$
n(n+1)/2 ### $\boxed{\frac{n(n+1)}{2}}$ ### $\boxed{\frac{n(n-1)}{2}}$
a_n = 3n - 1 ### $\boxed{3n-1}$ ### $\boxed{3n+1}$
3^{n-1} ### $\boxed{3^{n-1}}$ ### $\boxed{3^n-1}$
\frac{1}{x+1} ### $\boxed{1/(x+1)}$ ### $\boxed{1/x+1}$
\sqrt[3]{4} ### $\boxed{\sqrt[3]{4}}$ ### $\boxed{3\sqrt{4}}$
|x-2|<3 ### $\boxed{|x-2| < 3}$ ### $\boxed{|x-2| > 3}$
-1<x<4 ### $\boxed{-1 < x < 4}$ ### $\boxed{-1 \le x \le 4}$
Monday ### The day is **Monday**. ### The day is **Sunday**.
yes ### Answer: Yes. ### Answer: Yes and no.
even ### The function is $\boxed{\text{even}}$. ### The function is $\boxed{\text{neither even nor odd}}$.
36 ### 所以一共有36个苹果。 ### 所以一共有36万个苹果。
第三象限 ### 答案：第三象限 ### 答案：第二象限
AC ### 故选 AC。 ### 故选 A。
17 ### La respuesta es 17. ### La respuesta es 1.7.
6,4 ### Die Antwort ist \boxed{6, 4}. ### Die Antwort ist \boxed{6, 5}.
25 ### {"answer": 25} ### {"answer": 52, "check": 25}
14 ### I first thought \boxed{12}, but it is \boxed{14}. ### I first thought \boxed{14}, but it is \boxed{12}.
33 ### <think>It may be 30.</think>The total is 33. ### <think>It may be 33.</think>The total is 30.
120 ### $5! = \boxed{120}$ ### $\boxed{5!}$
21 ### $\binom{7}{2} = \boxed{21}$ ### $\boxed{\binom{7}{2}}$
4 ### $\sqrt{16} = 4$ ### The answer is $\sqrt{16}$.
13 ### $\boxed{+13}$ ### $\boxed{-13}$
90 ### 90 is the answer. ### 90% is the answer to another question; here it is 80.
200 ### It takes 200 seconds. ### It takes about 200 to 300 seconds.
3.14 ### Rounded, this is $\boxed{3.14}$. ### Rounded, this is $\boxed{\pi}$.
\pi ### $\boxed{\pi}$ ### $\boxed{3.14}$
6.02\times10^{23} ### $\boxed{6.02\cdot 10^{23}}$ ### $\boxed{6.02\cdot 10^{-23}}$
9.8 m/s^2 ### $\boxed{9.8\ \text{m/s}^2}$ ### $\boxed{9.8\ \text{m/s}}$
50 N ### The force is \boxed{50\,\mathrm{N}}. ### The force is \boxed{50\,\mathrm{J}}.
m_1 g ### $\boxed{m_1 g}$ ### $\boxed{m_2 g}$
\frac{GMm}{r^2} ### $\boxed{\frac{G m M}{r^{2}}}$ ### $\boxed{\frac{GMm}{r}}$
16 ### Each child gets 16 candies. ### Each child gets 16 candies more than 4.
7 ### x - 3 = 4, so x = 7 ### x - 3 = 4, so x = 4 + 3
0.2 ### $\boxed{\frac{1}{5}}$ ### $\boxed{\frac{2}{5}}$
5050 ### The sum of all of them is **5050**. ### The sum of all of them is **1+2+...+100**.
""".strip().splitlines()


def by_package(completion, truth):
    from math_verify import verify
    answer = extract_answer(completion)
    return bool(answer) and verify(parsed(f"${truth}$"), parsed(f"${answer}$"), timeout_seconds=None)


def main():
    verifiers = {"tasks/check_answer.py": check_answer, "math-verify behind its signs": by_package,
                 "both, --reward=math_verify": lambda text, truth: check_answer(text, truth, algebra=True)}
    by_package("1", "1")                                        # the import takes seconds
    for name, verifier in verifiers.items():
        start, missed, paid = time.perf_counter(), [], []
        for truth, right, wrong in (line.split(" ### ") for line in PAIRS):
            if not verifier(right, truth):
                missed.append(f"{truth}: {right}")
            if verifier(wrong, truth):
                paid.append(f"{truth}: {wrong}")
        seconds = (time.perf_counter() - start) / len(PAIRS) / 2 * 1000
        print(f"{name}: {len(PAIRS) - len(missed)} of {len(PAIRS)} right ones accepted, {len(paid)} of {len(PAIRS)} "
              f"wrong ones; {seconds:.2f} s per 1,000")
        if "-v" in sys.argv:
            print(*(f"    missed {line}" for line in missed), *(f"    paid {line}" for line in paid), sep="\n")


if __name__ == "__main__":
    main()
