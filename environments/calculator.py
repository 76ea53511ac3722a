"""A tool for arithmetic. torchrun train_grpo.py config/tasks/calculator.py"""
import ast
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(node):
    # Returns the value of a node of Python's syntax tree: of a sum, a difference, a product or a number.
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        operate = OPERATORS[type(node.op)]
        return operate(value(node.left), value(node.right))
    return int(ast.unparse(node))


class Calculator:
    def reset(self, **row):
        """Does nothing. There is no get_reward either: the task's verifier scores the last message."""

    def calculate(self, expression: str) -> str:
        """Computes the value of an expression of whole numbers.

        Args:
            expression: Numbers, joined by + - and *.
        """
        return str(value(ast.parse(expression, mode="eval").body))
