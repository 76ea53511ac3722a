"""A game: find a number from 1 to 64 in six guesses. torchrun train_grpo.py config/tasks/guess.py"""
import re


class Guess:
    """Answers a guess with higher or lower. Reward: 1 for finding the number."""

    def reset(self, number, **row):
        self.number = number

    def step(self, text):
        guess = re.fullmatch(r"\s*(\d{1,3})\s*", text)
        if not guess:
            return "A number from 1 to 64, please.", 0.0, False
        guess = int(guess[1])
        if guess == self.number:
            return None, 1.0, True
        return "higher" if self.number > guess else "lower", 0.0, False
