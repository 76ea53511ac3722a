"""A tool for arithmetic. python train_grpo.py config/calculator.py"""
import ast
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator:
    """Has one tool, and no reward of its own: the task's verifier scores the last message."""

    def reset(self, **row):
        pass

    def calculate(self, expression: str) -> str:
        """Computes the value of an expression of whole numbers.

        Args:
            expression: Numbers, joined by + - and *.
        """
        def value(node):
            if isinstance(node, ast.BinOp):
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
            return int(node.value)
        return str(value(ast.parse(expression, mode="eval").body))
