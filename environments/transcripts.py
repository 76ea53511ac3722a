"""
Conversations that the small model of config/guess.py and config/calculator.py has read: games of guess_number.py
and arithmetic with calculator.py, played badly more often than well. config/episodes_base.py names this file.

In games a guess is mostly any number, sometimes one that is still possible, and rarely the middle of those. In
arithmetic the answer is mostly a wrong one without the tool. GRPO has to find what pays.
"""
import os
import sys

from transformers.utils import get_json_schema

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from calculator import Calculator
from guess_number import Guess

from data import held_out
from problems import arithmetic_problem, guess_problem

TOOLS = [get_json_schema(Calculator().calculate)]


def problem(rng, generator, difficulty=1):
    # One of the train split.
    while True:
        text, columns = generator(rng, difficulty)
        if not held_out(text) and not held_out(columns.get("hidden", text)):
            return [{"role": "user", "content": text}], columns


def game(rng):
    messages, columns = problem(rng, guess_problem)
    environment, low, high = Guess(), 1, 64
    environment.reset(columns["number"])
    for _ in range(6):
        kind = rng.random()
        guess = (rng.randint(1, 64) if kind < 0.55 else rng.randint(low, high) if kind < 0.85 else
                 (low + high) // 2)
        observation, _, done = environment.step(str(guess))
        messages.append({"role": "assistant", "content": str(guess)})
        if done:
            break
        low, high = (max(low, guess + 1), high) if observation == "higher" else (low, min(high, guess - 1))
        messages.append({"role": "user", "content": observation})
    return None, messages if messages[-1]["role"] == "assistant" else messages[:-1]


def arithmetic(rng):
    messages, columns = problem(rng, arithmetic_problem)
    question, answer = messages[0]["content"], columns["answer"]
    if rng.random() < 0.8:
        wrong = str(int(answer) + rng.randint(-300, 300))
        return TOOLS, messages + [{"role": "assistant", "content": f"Answer: {wrong}"}]
    call = {"name": "calculate", "arguments": {"expression": question.removeprefix("What is ")[:-1]}}
    return TOOLS, messages + [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "calculate", "content": answer},
        {"role": "assistant", "content": f"Answer: {answer}"}]


def draw(rng):
    return game(rng) if rng.random() < 0.6 else arithmetic(rng)
