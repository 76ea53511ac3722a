"""
Conversations for pretrain.py to read, from which two of the shipped models have learned.

config/episodes_base.py takes those of draw: games of environments/guess_number.py, and arithmetic with
environments/calculator.py, seldom played well. In most games the player talks before it plays, and in many it
guesses only near the middle of the numbers that are left. In arithmetic it mostly answers without the tool,
and then it is wrong. GRPO has to find out what pays. No prompt here is a held-out problem's, but every number
has been played.

config/compose_base.py takes those of compose. Each answer carries out some operations of its prompt, all of
them correctly, but in a random order. GRPO has to find out that the prompt's order is the right one.
"""
from tasks.generate_problems import arithmetic_problem, carried_out, chain, guess_problem, held_out

# The chat template reads only this part of the calculator's schema.
TOOLS = [{"function": {"name": "calculate", "parameters": {"properties": {"expression": {}}}}}]


def problem(rng, generator):
    # Draws a problem of the train split. Returns its prompt and its columns.
    text, columns = generator(rng, 1)
    while held_out(text):
        text, columns = generator(rng, 1)
    return [{"role": "user", "content": text}], columns


def game(rng):
    messages, columns = problem(rng, guess_problem)
    number, low, high = columns["number"], 1, 64
    talks, near = rng.choice([0, 1, 1, 2, 2, 2, 3, 3]), rng.random() < 0.5
    for turn in range(6):
        spread = (high - low) // 4 * near
        guess = (low + high) // 2 + rng.randint(-spread, spread)
        if turn < talks:
            said, heard = rng.choice(["Let me think.", "A number?", "Hm."]), "A number from 1 to 64, please."
        elif guess < number:
            said, heard, low = str(guess), "higher", guess + 1
        else:
            said, heard, high = str(guess), "lower", guess - 1
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": heard}]
        if said == str(number):
            break
    # The right guess and the sixth end the game, so nothing is said to them.
    return None, messages[:-1]


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


def compose(rng):
    depth = rng.choice([1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8])
    digits, order = chain(rng, depth)
    while held_out(text := f"{digits} {''.join(order)}"):
        digits, order = chain(rng, depth)
    read = carried_out(digits, rng.sample(order, rng.randint(1, depth)))
    return None, [{"role": "user", "content": text}, {"role": "assistant", "content": read}]
