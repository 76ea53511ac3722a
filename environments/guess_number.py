"""A game: find a number from 1 to 64 in six guesses. torchrun train_grpo.py config/tasks/guess.py"""
import re


class Guess:
    """Answers a guess with higher or lower, and rewards the right guess with 1."""

    def reset(self, number, **row):
        self.number = number

    def step(self, text):
        if not re.fullmatch(r"\s*\d{1,3}\s*", text):
            return "A number from 1 to 64, please.", 0.0, False
        guess = int(text)
        if guess == self.number:
            return None, 1.0, True
        if guess < self.number:
            return "higher", 0.0, False
        return "lower", 0.0, False
